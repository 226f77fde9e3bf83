#include "core/store/init.h"

#include <cmath>

namespace shoal {

InitRange make_init_range(double init_min, double init_max) {
  InitRange range;
  range.min = static_cast<float>(init_min);
  double width = init_max - static_cast<double>(range.min);
  if (!(width > 0)) return range;
  int exponent = 0;
  std::frexp(width, &exponent);  // width is in [2^(exponent-1), 2^exponent).
  int unit_exponent = exponent - 24;
  if (unit_exponent < -126) unit_exponent = -126;  // The unit stays a normal float.
  range.unit = static_cast<float>(std::ldexp(1.0, unit_exponent));
  range.steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(width, -unit_exponent)));
  return range;
}

void initial_values(const TableDesc& table, int64_t id, float* out) {
  const uint64_t key = init_key(table.seed, id);
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  const uint64_t steps = table.init.steps;
  const float unit = table.init.unit, min = table.init.min;
  for (uint32_t column = 0; column < table.dim; ++column) {
    const uint32_t units = static_cast<uint32_t>((column_bits(low, high, table.first_column + column) * steps) >> 32);
    out[column] = min + static_cast<float>(static_cast<int32_t>(units)) * unit;
  }
}

namespace {

constexpr uint32_t kStackDim = 4096;  // TableSpec.validate bounds embedding_dim.

// Eight columns at a time, in GCC's vector types: element-wise integer operations, so the same bits on every ISA.
typedef uint32_t Words __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint16_t WordHalves __attribute__((vector_size(32)));
constexpr uint32_t kGroup = 8;

inline Words random_words(uint32_t low, uint32_t high, uint32_t first_column) {
  const Words columns = first_column + Words{0, 1, 2, 3, 4, 5, 6, 7};
  Words x = low + columns * kGolden32;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= high;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

// The sign, and the infinities and NaN, that rounding the magnitude has left out.
inline Halves finish(Ints rounded, Ints bits, int32_t infinity, int32_t nan) {
  const Ints magnitude = bits & 0x7FFFFFFF;
  rounded = magnitude == 0x7F800000 ? Ints{} + infinity : rounded;
  rounded = magnitude > 0x7F800000 ? Ints{} + nan : rounded;
  rounded |= (bits >> 16) & 0x8000;
  const WordHalves halves = (WordHalves)rounded;  // Little-endian: the low halves are the even ones.
  return __builtin_shufflevector(halves, halves, 0, 2, 4, 6, 8, 10, 12, 14);
}

// bfloat16 is the high half of a float32: add 16 random bits below it and cut.
inline Halves to_bfloat(Ints bits, Words random) {
  const Ints magnitude = bits & 0x7FFFFFFF;
  const Ints rounded = (magnitude + (Ints)(random >> 16)) >> 16;
  return finish(rounded > 0x7F7F ? Ints{} + 0x7F7F : rounded, bits, 0x7F80, 0x7FC0);
}

// float16 keeps 10 of 23 mantissa bits: in its normal range add 13 random bits and cut. Below 2^-14 its grid is
// uniform with step 2^-24: cut the value times 2^24 after adding a random fraction with 13 bits.
inline Halves to_half(Ints bits, Words random) {
  const Ints magnitude = bits & 0x7FFFFFFF;
  const Ints noise = (Ints)(random >> 19);
  Ints normal = ((magnitude + noise) >> 13) - (112 << 10);  // Exponent bias 127 -> 15.
  normal = normal > 0x7BFF ? Ints{} + 0x7BFF : normal;
  const Ints is_small = magnitude < 0x38800000;
  const Lanes scaled = (Lanes)(magnitude & is_small) * 16777216.0f;
  const Lanes fraction = __builtin_convertvector(noise, Lanes) * 0x1p-13f;
  const Ints small = __builtin_convertvector(scaled + fraction, Ints);
  return finish(is_small ? small : normal, bits, 0x7C00, 0x7E00);
}

template <RowType TYPE>
inline void encode_group(const float* values, uint32_t low, uint32_t high, uint32_t column, uint16_t* out) {
  Ints bits;
  std::memcpy(&bits, values, 32);
  const Words random = random_words(low, high, column);
  const Halves rounded = TYPE == RowType::BF16 ? to_bfloat(bits, random) : to_half(bits, random);
  std::memcpy(out, &rounded, 16);
}

template <RowType TYPE>
void encode(const float* values, uint32_t dim, uint32_t first_column, uint64_t key, uint16_t* out) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  uint32_t d = 0;
  for (; d + kGroup <= dim; d += kGroup) encode_group<TYPE>(values + d, low, high, first_column + d, out + d);
  if (d == dim) return;
  float last[kGroup] = {};
  uint16_t rounded[kGroup];
  std::memcpy(last, values + d, (dim - d) * sizeof(float));
  encode_group<TYPE>(last, low, high, first_column + d, rounded);
  std::memcpy(out + d, rounded, (dim - d) * sizeof(uint16_t));
}

}  // namespace

void encode_row(const TableDesc& table, int64_t id, uint64_t step, const float* values, std::byte* weights) {
  const uint64_t key = rounding_key(table.seed, id, step);
  uint16_t* out = reinterpret_cast<uint16_t*>(weights);
  if (table.type == RowType::BF16) {
    encode<RowType::BF16>(values, table.dim, table.first_column, key, out);
  } else {
    encode<RowType::F16>(values, table.dim, table.first_column, key, out);
  }
}

namespace {

// A new row's weights are rounded with the bits of step 0, which no update uses (steps count from 1).
void store_initial(const TableDesc& table, int64_t id, std::byte* weights) {
  if (table.type == RowType::F32) {
    float* out = reinterpret_cast<float*>(weights);
    initial_values(table, id, out);
    return;
  }
  float values[kStackDim];
  initial_values(table, id, values);
  encode_row(table, id, 0, values, weights);
}

}  // namespace

void initial_row(const TableDesc& table, int64_t id, float* out) {
  if (table.type == RowType::F32) {
    initial_values(table, id, out);
    return;
  }
  uint16_t stored[kStackDim];
  std::byte* weights = reinterpret_cast<std::byte*>(stored);
  store_initial(table, id, weights);
  decode_row(table.type, weights, table.dim, out);
}

void materialise(const TableDesc& table, const RecordLayout& layout, int64_t id, std::byte* record) {
  RowHeader* head = header(record);
  head->id = id;
  head->last_step = 0;
  head->state = kReserved;
  float* state = slots(record);
  const bool is_adagrad =
      table.optimizer == OptimizerKind::ADAGRAD || table.optimizer == OptimizerKind::ROWWISE_ADAGRAD;
  const float first = is_adagrad ? table.initial_accumulator : 0.0f;
  for (uint32_t s = 0; s < layout.slot_width; ++s) state[s] = first;
  store_initial(table, id, record + layout.weights_offset);
}

}  // namespace shoal
