#include "core/step/codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/step/simd.h"
#include "core/store/record.h"

namespace shoal::step {
namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

constexpr float kHalfMax = 65504.f;

// Nearest even, saturating. The hardware's conversion and this one agree on every float (tests).
uint16_t float_to_half(float x) {
  const uint32_t bits = bits_of(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;                       // NaN
  if (magnitude >= 0x477FE000u) return sign | 0x7BFFu;                      // at or above 65504: the largest half
  if (magnitude < 0x38800000u) {                                            // below 2^-14: a multiple of 2^-24
    float positive;
    std::memcpy(&positive, &magnitude, sizeof positive);
    return sign | static_cast<uint16_t>(std::nearbyintf(positive * 0x1p24f));
  }
  const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
  return sign | static_cast<uint16_t>((rounded - (112u << 23)) >> 13);
}

uint16_t float_to_bfloat(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// Towards minus infinity, towards plus infinity; finite inputs only.
uint16_t bfloat_below(float x) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((x < 0 ? bits + 0xFFFFu : bits) >> 16);
}
uint16_t bfloat_above(float x) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((x < 0 ? bits : bits + 0xFFFFu) >> 16);
}

void encode_int8(const float* row, int dim, std::byte* out) {
  float low = row[0], high = row[0];
  for (int d = 1; d < dim; ++d) {
    low = std::min(low, row[d]);
    high = std::max(high, row[d]);
  }
  const uint16_t bias_bits = bfloat_below(low);
  const float bias = bfloat_to_float(bias_bits);
  const uint16_t scale_bits = bfloat_above((high - bias) / 255.f);
  const float scale = bfloat_to_float(scale_bits);
  // The inverse of a scale near the smallest float is beyond the largest: such rows are divided instead.
  const bool is_tiny = scale > 0 && !std::isfinite(1.f / scale);
  const float inverse = scale > 0 && !is_tiny ? 1.f / scale : 0.f;
  std::memcpy(out, &scale_bits, 2);
  std::memcpy(out + 2, &bias_bits, 2);
  uint8_t* codes = reinterpret_cast<uint8_t*>(out + 4);
  for (int d = 0; d < dim; ++d) {
    const float code = (is_tiny ? (row[d] - bias) / scale : (row[d] - bias) * inverse) + 0.5f;
    codes[d] = static_cast<uint8_t>(code > 0.f ? (code < 255.f ? code : 255.f) : 0.f);  // a NaN is 0
  }
  std::memset(codes + dim, 0, static_cast<size_t>(encoded_bytes(Codec::kInt8, dim) - 4 - dim));
}

void decode_int8(const std::byte* in, int dim, float* row) {
  uint16_t scale_bits, bias_bits;
  std::memcpy(&scale_bits, in, 2);
  std::memcpy(&bias_bits, in + 2, 2);
  const float scale = bfloat_to_float(scale_bits), bias = bfloat_to_float(bias_bits);
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(in + 4);
  for (int d = 0; d < dim; ++d) row[d] = bias + scale * static_cast<float>(codes[d]);
}

void encode_half(const float* row, int dim, uint16_t* out) {
  int d = 0;
#if defined(__F16C__)
  const __m256 most = _mm256_set1_ps(kHalfMax), least = _mm256_set1_ps(-kHalfMax);
  for (; d + 8 <= dim; d += 8) {
    const __m256 x = _mm256_loadu_ps(row + d);
    // min(a, b) gives b where a is a NaN, hence the order.
    const __m256 kept = _mm256_max_ps(least, _mm256_min_ps(most, x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + d), _mm256_cvtps_ph(kept, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; d < dim; ++d) out[d] = float_to_half(row[d]);
}

}  // namespace

void encode_wire(Codec codec, const float* row, int dim, std::byte* out) {
  switch (codec) {
    case Codec::kFp32: std::memcpy(out, row, dim * sizeof(float)); return;
    case Codec::kInt8: encode_int8(row, dim, out); return;
    case Codec::kFp16: encode_half(row, dim, reinterpret_cast<uint16_t*>(out)); break;
    case Codec::kBf16: {
      uint16_t* halves = reinterpret_cast<uint16_t*>(out);
      for (int d = 0; d < dim; ++d) halves[d] = float_to_bfloat(row[d]);
      break;
    }
  }
  if (dim % 2) std::memset(out + 2 * dim, 0, 2);
}

void decode_wire(Codec codec, const std::byte* in, int dim, float* row) {
  switch (codec) {
    case Codec::kFp32: std::memcpy(row, in, dim * sizeof(float)); return;
    case Codec::kInt8: decode_int8(in, dim, row); return;
    case Codec::kFp16: decode_row(RowType::F16, in, static_cast<uint32_t>(dim), row); return;
    case Codec::kBf16: decode_row(RowType::BF16, in, static_cast<uint32_t>(dim), row); return;
  }
}

}  // namespace shoal::step
