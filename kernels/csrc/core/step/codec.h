// Wire formats of rows and gradients. One row at a time; a row's bytes are a multiple of 4.
//
//   fp32   4 D bytes: the numbers themselves
//   fp16   2 D bytes, nearest even; beyond 65504 it saturates, below 2^-25 it is 0
//   bf16   2 D bytes, nearest even: 8 bits of precision, the range of float32
//   int8   bfloat16 scale, bfloat16 bias, D bytes: x = bias + scale * q. The bias is rounded down and the scale up, so that
//          all of [min, max] is covered: |x - decoded| <= scale / 2, and scale <= (max - min + 2^-7 |min|) (1 + 2^-7) / 255
//
// A NaN does not survive int8; gradients are checked before they are encoded. Elementwise but for int8's range, so that
// bits do not depend on how a row is cut into vectors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal::step {

enum class Codec : int { kFp32 = 0, kFp16 = 1, kBf16 = 2, kInt8 = 3 };
constexpr int kNumCodecs = 4;

constexpr int64_t encoded_bytes(Codec codec, int64_t dim) {
  switch (codec) {
    case Codec::kFp16:
    case Codec::kBf16: return (2 * dim + 3) & ~int64_t{3};
    case Codec::kInt8: return (4 + dim + 3) & ~int64_t{3};
    default: return 4 * dim;
  }
}

// Padding is zeroed. `out` and `in` are 2-byte aligned.
void encode_wire(Codec codec, const float* row, int dim, std::byte* out);
void decode_wire(Codec codec, const std::byte* in, int dim, float* row);

}  // namespace shoal::step
