// exp and tanh against libm, Philox against the published answers, and the ranked list against a sort.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "isa/scalar.h"
#include "ops/math.h"
#include "ops/philox.h"
#include "ops/sample.h"

namespace {

using headrace::kLanes;
using headrace::Math;
using Isa = headrace::scalar::Isa;
using Sample = headrace::Sample<Isa>;

int faults = 0;
void expect(bool is_good, const char* what, double value) {
  if (!is_good && ++faults <= 20) std::printf("FAULT: %s at %.9g\n", what, value);
}

float lane(Isa::F x) { return x.v[0]; }

void exp_is_within_two_ulp() {
  double worst = 0.0;
  for (int i = -500'000; i <= 500'000; ++i) {
    const float x = static_cast<float>(i) * 176e-6f;  // −88 … 88
    const double want = std::exp(static_cast<double>(x));
    if (x < Math<Isa>::kExpMin) continue;
    const double general = std::fabs(lane(Math<Isa>::exp(Isa::set1(x))) / want - 1.0);
    worst = std::max(worst, general);
    expect(general < 2 * 0x1p-23, "exp", x);
    if (x > 0.0f) continue;
    expect(lane(Math<Isa>::exp_nonpositive(Isa::set1(x))) == lane(Math<Isa>::exp(Isa::set1(x))), "exp_nonpositive", x);
  }
  std::printf("exp: worst relative error %.2f x 2^-23\n", worst * 0x1p23);
}

void weights_are_near() {
  for (int i = 0; i <= 500'000; ++i) {
    const float x = static_cast<float>(i) * -174e-6f;  // −87 … 0
    const double error = std::fabs(lane(Math<Isa>::exp_weight(Isa::set1(x))) / std::exp(static_cast<double>(x)) - 1.0);
    expect(error < 0x1p-22 * std::max(1.0, std::fabs(static_cast<double>(x)) / 4), "exp_weight", x);
  }
  expect(lane(Math<Isa>::exp_weight(Isa::set1(0.0f))) == 1.0f, "exp_weight is one", 0.0);
  // Scaled scores lie a rounding above the maximum at most.
  for (const float x : {1e-6f, 1e-3f}) expect(lane(Math<Isa>::exp_weight(Isa::set1(x))) >= 1.0f, "exp_weight", x);
  const float inf = std::numeric_limits<float>::infinity(), least = lane(Math<Isa>::exp_weight(Isa::set1(-87.0f)));
  expect(least > 1.6e-38f && least < 1.7e-38f, "exp_weight is least", -87.0);
  for (const float x : {-inf, -1e30f, -87.5f})
    expect(lane(Math<Isa>::exp_weight(Isa::set1(x))) == least, "exp_weight", x);
  // Every NaN travels, whatever its last bits would be as an exponent.
  for (const uint32_t bits : {0x7fc00000u, 0x7fc000ffu, 0x7fffffffu, 0xffc00001u})
    expect(std::isnan(lane(Math<Isa>::exp_weight(Isa::set1(std::bit_cast<float>(bits))))), "exp_weight keeps NaN",
           bits);
}

void exp_keeps_its_edges() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float x : {-inf, -1e30f, -1000.0f, -88.0f}) {
    expect(lane(Math<Isa>::exp(Isa::set1(x))) == 0.0f, "exp is zero", x);
    expect(lane(Math<Isa>::exp_nonpositive(Isa::set1(x))) == 0.0f, "exp_nonpositive is zero", x);
  }
  for (const float x : {inf, 89.0f, 1e30f}) expect(lane(Math<Isa>::exp(Isa::set1(x))) == inf, "exp is infinite", x);
  expect(lane(Math<Isa>::exp(Isa::set1(0.0f))) == 1.0f, "exp is one", 0.0);
  expect(std::isnan(lane(Math<Isa>::exp(Isa::set1(nan)))), "exp keeps NaN", nan);
  expect(std::isnan(lane(Math<Isa>::exp_nonpositive(Isa::set1(nan)))), "exp_nonpositive keeps NaN", nan);
  expect(std::isnan(lane(Math<Isa>::tanh(Isa::set1(nan)))), "tanh keeps NaN", nan);
}

void tanh_is_near() {
  for (int i = -20'000; i <= 20'000; ++i) {
    const float x = static_cast<float>(i) * 1e-3f;
    const double error = lane(Math<Isa>::tanh(Isa::set1(x))) - std::tanh(static_cast<double>(x));
    expect(std::fabs(error) < 0x1p-22, "tanh", x);
  }
}

// Known answers of the authors' Random123 library.
void philox_gives_the_published_words() {
  struct Case {
    uint32_t key[2];
    headrace::Philox<Isa>::Block counter, want;
  };
  const Case cases[] = {
      {{0, 0}, {{0, 0, 0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{0xffffffff, 0xffffffff},
       {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{0xa4093822, 0x299f31d0},
       {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const Case& c : cases) {
    const auto got = headrace::Philox<Isa>::block(c.key[0], c.key[1], c.counter);
    for (int i = 0; i < 4; ++i) expect(got.v[i] == c.want.v[i], "philox word", i);
  }
  for (int position = 0; position < 1000; ++position) {
    const double u = headrace::Philox<Isa>::uniform(7, position);
    expect(u >= 0.0 && u < 1.0, "uniform in [0, 1)", position);
  }
}

void the_best_of_a_stream_are_those_of_a_sort() {
  uint32_t state = 1;
  for (int capacity : {0, 1, 2, 20, 256}) {
    for (int count : {0, 1, 19, 256, 5000}) {
      std::vector<Sample::Entry> all, heap(static_cast<size_t>(capacity) + 1);
      Sample::Best best{heap.data(), 0, capacity};
      for (int id = 0; id < count; ++id) {
        state = state * 1664525u + 1013904223u;
        const Sample::Entry entry{static_cast<float>(state >> 23), id};  // 512 values: many ties
        all.push_back(entry);
        best.offer(entry);
      }
      best.sort();
      std::sort(all.begin(), all.end(), Sample::is_better);
      expect(best.size == std::min(capacity, count), "size of the list", count);
      for (int i = 0; i < best.size; ++i)
        expect(heap[static_cast<size_t>(i)].id == all[static_cast<size_t>(i)].id, "entry", i);
    }
  }
}

}  // namespace

int main() {
  exp_is_within_two_ulp();
  weights_are_near();
  exp_keeps_its_edges();
  tanh_is_near();
  philox_gives_the_published_words();
  the_best_of_a_stream_are_those_of_a_sort();
  std::printf("sampling: %d faults\n", faults);
  return faults != 0;
}
