// The virtual machine: a validated program, its memory, and the threads that run its steps.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/claims.h"
#include "core/kernels.h"
#include "core/memory.h"
#include "core/pool.h"
#include "core/step.h"

namespace headrace {

struct VmConfig {
  int64_t arena_bytes = 0;
  int32_t threads = 1;
  int32_t max_rows = 1;
  int32_t max_sequences = 1;
  int32_t max_outputs = 1;
  int32_t max_top = 0;
  KvPool kv;  // `data` is set by the VM
};

// Decode steps that follow one another: each sequence's next row is the token that it chose.
struct DecodeRun {
  int32_t steps = 1;                     // at most
  std::span<const int32_t> stop_ids;     // tokens that end a sequence, of all sequences
  std::span<const int32_t> stop_starts;  // [S + 1] ranges of them
  int wake_fd = -1;                      // once it can be read, no further step is started; −1 for none
};

// Constructors throw std::invalid_argument with what is wrong in a record or weight; a step checks its inputs before
// it starts and throws the same. Nothing throws, allocates or locks inside a step.
class Vm {
 public:
  Vm(std::span<const Record> records, std::vector<Weight> weights, const VmConfig& config, const KernelTable& kernels);

  // Runs the first `num_records` records (all by default) over the step. `step.row_seq` is filled in here.
  void step(StepView step, int64_t num_records = -1);

  // Runs steps of one row and one output per sequence until `run.steps` are done, a sequence has chosen one of its stop
  // ids or given no number, or `run.wake_fd` has something to read; returns how many were run, at least one. The block
  // tables must hold the pages of all of them. `first` has room for the results of all: [steps][S], as its top lists.
  int32_t decode(const StepView& first, const DecodeRun& run);

  // Threads that the steps from now on use, 1 to limits().threads. The results do not depend on it.
  void set_threads(int32_t threads);

  // Nanoseconds of one thread at one record, summed over the steps since they were last counted from zero: until the
  // record began (the barrier before it), and in it.
  struct RecordTime {
    int64_t waiting_ns = 0, working_ns = 0;
  };
  // Starts counting at zero, or stops. Between steps only.
  void time_records(bool is_on);
  std::span<const RecordTime> record_times() const { return times_; }  // [threads][records], empty while off

  const Limits& limits() const { return limits_; }
  const KvPool& kv() const { return kv_; }
  const uint8_t* arena() const { return arena_.data(); }
  int64_t arena_bytes() const { return arena_.size_bytes(); }
  int64_t kv_bytes() const { return kv_memory_.size_bytes(); }
  int64_t scratch_bytes() const { return scratch_.size_bytes(); }
  const char* isa() const { return kernels_->isa; }

 private:
  void check_record(const Record& record);
  void check_step(const StepView& step);
  const Weight& check_matrix(const char* what, int32_t index, int64_t n, int64_t k) const;
  void check_vector(const char* what, int32_t index, int64_t n) const;
  // The most rows that a step may have of a domain.
  int32_t most_rows(Domain domain) const;
  void check_buffer(const char* what, int64_t offset, int64_t width, Domain domain = Domain::kRows) const;
  template <class R>
  void check_prologue(const R& record, Domain domain = Domain::kRows, bool may_be_prepared = false);
  template <class R>
  void check_heads(const R& record);
  template <class R>
  void check_rotation(const R& record);
  static void check_eps(const char* what, float eps);
  void limit_positions(int64_t positions);
  void run_thread(int32_t thread);

  const KernelTable* kernels_;
  std::vector<Weight> weights_;
  std::vector<Record> records_;
  std::vector<bool> has_barrier_;  // one before this record
  Limits limits_;
  KvPool kv_;
  bool has_kv_ = false;          // any record reads or writes pages
  bool has_positions_ = false;   // any record looks up positions, limits_.max_positions bounds them
  bool has_step_pages_ = false;  // any record reads or writes pages of the step's own rows
  int32_t token_types_ = 0;      // least rows of the token type tables, 0 without one
  int32_t vocab_ = 0;            // least rows of the embedding tables: token ids are below
  int32_t head_vocab_ = 0;
  // What PREPARE writes where; only while records are checked.
  struct Prepared {
    Layout layout;
    int32_t k;
  };
  std::map<int64_t, Prepared> prepared_;
  KvPool step_kv_;
  Memory arena_, kv_memory_, step_kv_memory_, scratch_;
  std::vector<int32_t> row_seq_;     // [max_rows]
  std::vector<int32_t> step_pages_;  // [max_sequences]
  // Of the running decode step.
  std::vector<int32_t> decode_tokens_, decode_positions_;  // [max_sequences]
  std::vector<OutputRow> decode_outputs_;                  // [max_sequences]
  std::vector<ThreadContext> contexts_;
  std::vector<RecordTime> times_;
  std::vector<Taken> parts_;    // [threads]
  std::vector<Rounds> rounds_;  // [threads]
  StepView step_;
  int64_t num_records_ = 0;
  Pool pool_;
};

}  // namespace headrace
