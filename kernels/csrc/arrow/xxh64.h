// XXH64, written from its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): the hash that turns string
// ids into 64-bit ids. Published, with implementations in every language, so that a server in another language
// computes the same ids. Test vectors, seed 0: "" -> ef46db3751d8e999, "a" -> d24ec4f1a98c6e5b,
// "abc" -> 44bc2cf5ad770999.
#pragma once

#include <cstdint>
#include <cstring>

namespace shoal {

namespace xxh64_detail {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ull;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Full;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9ull;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63ull;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5ull;

inline uint64_t rotate_left(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

// Little-endian loads; Shoal's targets (x86-64, AArch64) are little-endian.
inline uint64_t load64(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);
  return x;
}

inline uint32_t load32(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

inline uint64_t mix_lane(uint64_t accumulator, uint64_t lane) {
  return rotate_left(accumulator + lane * kPrime2, 31) * kPrime1;
}

inline uint64_t merge_lane(uint64_t accumulator, uint64_t lane) {
  return (accumulator ^ mix_lane(0, lane)) * kPrime1 + kPrime4;
}

}  // namespace xxh64_detail

inline uint64_t xxh64(const void* data, uint64_t length, uint64_t seed = 0) {
  using namespace xxh64_detail;
  const uint8_t* p = static_cast<const uint8_t*>(data);
  uint64_t left = length;
  uint64_t hash;
  if (left >= 32) {
    uint64_t a = seed + kPrime1 + kPrime2, b = seed + kPrime2, c = seed, d = seed - kPrime1;
    for (; left >= 32; left -= 32, p += 32) {
      a = mix_lane(a, load64(p));
      b = mix_lane(b, load64(p + 8));
      c = mix_lane(c, load64(p + 16));
      d = mix_lane(d, load64(p + 24));
    }
    hash = rotate_left(a, 1) + rotate_left(b, 7) + rotate_left(c, 12) + rotate_left(d, 18);
    for (uint64_t lane : {a, b, c, d}) hash = merge_lane(hash, lane);
  } else {
    hash = seed + kPrime5;
  }
  hash += length;
  for (; left >= 8; left -= 8, p += 8) hash = rotate_left(hash ^ mix_lane(0, load64(p)), 27) * kPrime1 + kPrime4;
  if (left >= 4) {
    hash = rotate_left(hash ^ load32(p) * kPrime1, 23) * kPrime2 + kPrime3;
    left -= 4;
    p += 4;
  }
  for (; left > 0; --left, ++p) hash = rotate_left(hash ^ *p * kPrime5, 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace shoal
