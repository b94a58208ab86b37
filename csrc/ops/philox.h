// Philox4x32-10: random numbers as a pure function of (key, counter), so that a token's draw depends on its request's
// seed and its position and on nothing else. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (2011).
#pragma once

#include <cstdint>

namespace headrace {

template <class Isa>
struct Philox {
  struct Block {
    uint32_t v[4];
  };

  static Block block(uint32_t key0, uint32_t key1, Block counter) {
    Block c = counter;
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c.v[0], p1 = uint64_t{0xCD9E8D57u} * c.v[2];
      c = {{static_cast<uint32_t>(p1 >> 32) ^ c.v[1] ^ key0, static_cast<uint32_t>(p1),
            static_cast<uint32_t>(p0 >> 32) ^ c.v[3] ^ key1, static_cast<uint32_t>(p0)}};
      key0 += 0x9E3779B9u;  // the golden ratio and √3 - 1, as the paper's Weyl sequence
      key1 += 0xBB67AE85u;
    }
    return c;
  }

  // Uniform in [0, 1), a multiple of 2^-53, for the token at `position` of the request with this seed.
  static double uniform(uint64_t seed, int32_t position) {
    const Block out = block(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                            {{static_cast<uint32_t>(position), 0, 0, 0}});
    return (static_cast<double>(out.v[0] >> 5) * 0x1p26 + static_cast<double>(out.v[1] >> 6)) * 0x1p-53;
  }
};

}  // namespace headrace
