// Pure integer functions of (seed, id, column, step): placement, initial values and rounding bits.
//
// Every function here has a numpy twin in kernels/hashing.py that gives the same bits. They use only integer
// operations, so any device can compute them; nothing here may change once a checkpoint exists.
#pragma once

#include <cstdint>

namespace shoal {

inline constexpr uint64_t kGolden64 = 0x9E3779B97F4A7C15ull;
inline constexpr uint32_t kGolden32 = 0x9E3779B1u;

// The MurmurHash3 finaliser (public domain, Austin Appleby): a bijection of 64-bit values.
inline uint64_t fmix64(uint64_t h) {
  h ^= h >> 33;
  h *= 0xFF51AFD7ED558CCDull;
  h ^= h >> 33;
  h *= 0xC4CEB9FE1A85EC53ull;
  h ^= h >> 33;
  return h;
}

// Row block of an id whose mixed hash is `hash`: one of 2^log2_blocks equal ranges of hashes.
inline uint32_t block_of_hash(uint64_t hash, uint32_t log2_blocks) {
  return log2_blocks == 0 ? 0 : static_cast<uint32_t>(hash >> (64 - log2_blocks));
}

inline uint32_t row_block(int64_t id, uint32_t log2_blocks) {
  return block_of_hash(fmix64(static_cast<uint64_t>(id)), log2_blocks);
}

// The 64-bit key from which the initial values of a row are drawn.
inline uint64_t init_key(uint64_t seed, int64_t id) {
  return fmix64(static_cast<uint64_t>(id) ^ fmix64(seed + kGolden64));
}

// The 64-bit key from which the rounding bits of a row in a step are drawn.
inline uint64_t rounding_key(uint64_t seed, int64_t id, uint64_t step) {
  return fmix64(init_key(seed, id) + kGolden64 * (step + 1));
}

// 32 uniform bits for one column, from a row's key. 32-bit arithmetic only, so that compilers vectorise it. The
// multipliers are those of the "lowbias32" hash (Christopher Wellons, public domain); the key's high half enters
// between the two multiplications so that all 64 bits of the key count.
inline uint32_t column_bits(uint32_t key_low, uint32_t key_high, uint32_t column) {
  uint32_t x = key_low + column * kGolden32;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= key_high;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

}  // namespace shoal
