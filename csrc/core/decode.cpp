// Several decode steps in a row, without the caller in between.
#include <poll.h>

#include <algorithm>

#include "core/fail.h"
#include "core/vm.h"

namespace headrace {
namespace {

bool is_ready(int fd) {
  if (fd < 0) return false;
  pollfd wanted{fd, POLLIN, 0};
  return poll(&wanted, 1, 0) > 0;
}

}  // namespace

int32_t Vm::decode(const StepView& first, const DecodeRun& run) {
  const int32_t sequences = first.sequences();
  const auto count = static_cast<size_t>(sequences);
  if (run.steps < 1) fail("steps is ", run.steps, ", it must be positive");
  if (first.rows() != sequences || first.num_outputs() != sequences) {
    fail("each of the ", sequences, " sequences must have one row and one output");
  }
  if (first.results.size() != count * static_cast<size_t>(run.steps)) fail("results must have one entry per token");
  if (first.positions.size() != count) fail("positions must have one entry per row");
  const size_t top = static_cast<size_t>(first.max_top) * count;
  if (first.top_ids.size() != top * static_cast<size_t>(run.steps) ||
      first.top_logprobs.size() != first.top_ids.size()) {
    fail("top arrays have the wrong size");
  }
  if (run.stop_starts.size() != count + 1 || run.stop_starts[0] != 0 ||
      run.stop_starts[count] != static_cast<int32_t>(run.stop_ids.size()) ||
      !std::is_sorted(run.stop_starts.begin(), run.stop_starts.end())) {
    fail("stop_starts must hold rising ranges of stop_ids, one per sequence");
  }
  for (int32_t i = 0; i < sequences; ++i) {
    const OutputRow& o = first.outputs[static_cast<size_t>(i)];
    if (o.row != i || o.target >= 0) fail("output ", i, " must choose the token behind row ", i);
    if (o.counts_len > 0 || o.bias_len > 0 || o.mask >= 0) {
      fail("output ", i, " has penalties, biases or a mask: they change with every token");
    }
  }
  const auto step_at = [&](int32_t number) {
    StepView step = first;
    const auto at = static_cast<size_t>(number);
    step.tokens = std::span(decode_tokens_).first(count);
    step.positions = std::span(decode_positions_).first(count);
    step.outputs = std::span(decode_outputs_).first(count);
    step.results = first.results.subspan(at * count, count);
    step.top_ids = first.top_ids.subspan(at * top, top);
    step.top_logprobs = first.top_logprobs.subspan(at * top, top);
    return step;
  };
  if (count > decode_tokens_.size())
    fail("the step has ", sequences, " sequences, the limit is ", decode_tokens_.size());
  std::copy(first.tokens.begin(), first.tokens.end(), decode_tokens_.begin());
  std::copy(first.outputs.begin(), first.outputs.end(), decode_outputs_.begin());
  // The last step first: what it may touch, all may.
  for (size_t i = 0; i < count; ++i) decode_positions_[i] = first.positions[i] + run.steps - 1;
  check_step(step_at(0));
  std::copy(first.positions.begin(), first.positions.end(), decode_positions_.begin());
  for (int32_t number = 0; number < run.steps; ++number) {
    const StepView now = step_at(number);
    step(now);
    bool has_ended = false;
    for (size_t i = 0; i < count; ++i) {
      const ResultRow& result = now.results[i];
      const auto stops = run.stop_ids.subspan(static_cast<size_t>(run.stop_starts[i]),
                                              static_cast<size_t>(run.stop_starts[i + 1] - run.stop_starts[i]));
      has_ended |= result.status != 0 || std::find(stops.begin(), stops.end(), result.token) != stops.end();
      decode_tokens_[i] = result.token;
      ++decode_positions_[i];
      ++decode_outputs_[i].position;
    }
    if (has_ended || is_ready(run.wake_fd)) return number + 1;
  }
  return run.steps;
}

}  // namespace headrace
