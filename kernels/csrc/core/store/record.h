// The record of one row: a header, the optimizer state (float32), then the weights.
//
// One record rather than separate arrays: measured on random rows of 16 to 128 floats with huge pages, an update
// touches one line less and is 1.2 to 1.9 times faster, a gather 5 to 15 % slower, and the line that verifies the id
// in the id map is the line the gather needs next. Records are 8-byte aligned: strides of 280, 288 and 320 bytes for
// 64 columns differ by less than the noise, so the smallest wins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/store/table.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace shoal {

struct RowHeader {
  int64_t id;
  int32_t last_step;  // Step of the last update.
  uint32_t state;     // kExists | kReserved | access count (steps that updated the row, saturating).
  uint32_t stamp;     // Serial of the version layer that last saved this slot (see versions.h).
};
inline constexpr size_t kHeaderBytes = 20;  // The struct's tail padding belongs to the optimizer state.
static_assert(offsetof(RowHeader, stamp) + 4 == kHeaderBytes);
inline constexpr uint32_t kExists = 1u << 31;
inline constexpr uint32_t kReserved = 1u << 30;
inline constexpr uint32_t kCountMask = kReserved - 1;

// Offsets inside a record; shared by all tables of an arena.
struct RecordLayout {
  uint32_t dim = 0;
  uint32_t slot_width = 0;
  RowType type = RowType::F32;
  uint32_t weights_offset = 0;
  uint32_t stride = 0;

  RecordLayout() = default;
  RecordLayout(uint32_t dim_, uint32_t slot_width_, RowType type_) : dim(dim_), slot_width(slot_width_), type(type_) {
    weights_offset = static_cast<uint32_t>(kHeaderBytes + 4 * size_t{slot_width});
    stride = static_cast<uint32_t>((weights_offset + dim * row_type_bytes(type) + 7) / 8 * 8);
  }
};

inline RowHeader* header(std::byte* record) { return reinterpret_cast<RowHeader*>(record); }
inline const RowHeader* header(const std::byte* record) { return reinterpret_cast<const RowHeader*>(record); }
// The state of a record that another thread may be importing: a slot may have gone to a replica since it was noted.
inline uint32_t state_of(const RowHeader& head) { return __atomic_load_n(&head.state, __ATOMIC_RELAXED); }
inline void set_state(RowHeader* head, uint32_t state) { __atomic_store_n(&head->state, state, __ATOMIC_RELAXED); }
inline float* slots(std::byte* record) { return reinterpret_cast<float*>(record + kHeaderBytes); }
inline const float* slots(const std::byte* record) { return reinterpret_cast<const float*>(record + kHeaderBytes); }

// Prefetch every cache line of [begin, begin + bytes).
inline void prefetch_range(const std::byte* begin, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(begin + at, 0, 3);
  __builtin_prefetch(begin + bytes - 1, 0, 3);
}

// Eight floats as one value (a GCC vector type: any ISA).
typedef float Lanes __attribute__((vector_size(32)));

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  uint32_t wide = (magnitude << 13) + (112u << 23);                  // Exponent bias 15 -> 127.
  if (magnitude >= 0x7C00u) wide = (magnitude << 13) | 0x7F800000u;  // Infinity or NaN.
  float value;
  std::memcpy(&value, &wide, 4);
  if (magnitude < 0x0400u) value = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;  // Subnormal.
  std::memcpy(&wide, &value, 4);
  wide |= sign;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline float bfloat_to_float(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Weights of a row as float32; exact for every row type.
inline void decode_row(RowType type, const std::byte* weights, uint32_t dim, float* out) {
  if (type == RowType::F32) {
    std::memcpy(out, weights, size_t{dim} * 4);
    return;
  }
  const uint16_t* in = reinterpret_cast<const uint16_t*>(weights);
  if (type == RowType::BF16) {
    for (uint32_t d = 0; d < dim; ++d) out[d] = bfloat_to_float(in[d]);
    return;
  }
  uint32_t d = 0;
#if defined(__F16C__)
  for (; d + 8 <= dim; d += 8) {
    _mm256_storeu_ps(out + d, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + d))));
  }
#endif
  for (; d < dim; ++d) out[d] = half_to_float(in[d]);
}

}  // namespace shoal
