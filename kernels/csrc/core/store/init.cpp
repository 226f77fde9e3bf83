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
    const uint32_t units = static_cast<uint32_t>((column_bits(low, high, column) * steps) >> 32);
    out[column] = min + static_cast<float>(static_cast<int32_t>(units)) * unit;
  }
}

namespace {

constexpr uint32_t kStackDim = 4096;  // TableSpec.validate bounds embedding_dim.

uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// bfloat16 is the high half of a float32: add 16 random bits below it and cut.
inline uint16_t to_bfloat(float value, uint32_t random) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 16) & 0x8000u;
  uint32_t rounded = (magnitude + (random >> 16)) >> 16;
  if (rounded > 0x7F7F) rounded = 0x7F7F;
  if (magnitude >= 0x7F800000u) rounded = magnitude > 0x7F800000u ? 0x7FC0 : 0x7F80;
  return static_cast<uint16_t>(rounded | sign);
}

// float16 keeps 10 of 23 mantissa bits: in its normal range add 13 random bits and cut. Below 2^-14 its grid is
// uniform with step 2^-24: cut the value times 2^24 after adding a random fraction with 13 bits.
inline uint16_t to_half(float value, uint32_t random) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 16) & 0x8000u;
  const uint32_t noise = random >> 19;
  uint32_t normal = ((magnitude + noise) >> 13) - (112u << 10);  // Exponent bias 127 -> 15.
  if (static_cast<int32_t>(normal) > 0x7BFF) normal = 0x7BFF;
  float absolute;
  std::memcpy(&absolute, &magnitude, 4);
  const float scaled = (magnitude < 0x38800000u ? absolute : 0.0f) * 16777216.0f;
  const float fraction = static_cast<float>(static_cast<int32_t>(noise)) * 0x1p-13f;
  const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(scaled + fraction));
  uint32_t rounded = magnitude < 0x38800000u ? subnormal : normal;
  if (magnitude >= 0x7F800000u) rounded = magnitude > 0x7F800000u ? 0x7E00 : 0x7C00;
  return static_cast<uint16_t>(rounded | sign);
}

}  // namespace

void encode_row(const TableDesc& table, int64_t id, uint64_t step, const float* values, std::byte* weights) {
  const uint64_t key = rounding_key(table.seed, id, step);
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  uint16_t* out = reinterpret_cast<uint16_t*>(weights);
  if (table.type == RowType::BF16) {
    for (uint32_t d = 0; d < table.dim; ++d) out[d] = to_bfloat(values[d], column_bits(low, high, d));
  } else {
    for (uint32_t d = 0; d < table.dim; ++d) out[d] = to_half(values[d], column_bits(low, high, d));
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
