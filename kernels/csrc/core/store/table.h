// What the native code knows of a table. Mirrors kernels/spec.py TableSpec; the enum values are the Python ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace shoal {

enum class RowType : uint8_t { F32 = 0, F16 = 1, BF16 = 2 };
enum class OptimizerKind : uint8_t { SGD = 0, ADAGRAD = 1, ROWWISE_ADAGRAD = 2, ADAM = 3 };
enum class WeightDecayMode : uint8_t { NONE = 0, L2 = 1, DECOUPLED = 2 };

inline constexpr uint32_t kNoSlot = 0xFFFFFFFFu;

inline size_t row_type_bytes(RowType type) { return type == RowType::F32 ? 4 : 2; }

// Width of a row's optimizer state, in floats.
inline uint32_t slot_width(OptimizerKind kind, uint32_t dim) {
  switch (kind) {
    case OptimizerKind::SGD: return 0;
    case OptimizerKind::ADAGRAD: return dim;
    case OptimizerKind::ROWWISE_ADAGRAD: return 1;
    case OptimizerKind::ADAM: return 2 * dim;
  }
  return 0;
}

// A row starts at init_min + (bits * init_steps >> 32) * init_unit: one exact multiply (an integer below 2^24 by a
// power of two) and one add, hence the same bits with or without fused multiply-add.
struct InitRange {
  float min = 0;
  float unit = 0;
  uint32_t steps = 0;
};

InitRange make_init_range(double init_min, double init_max);

struct TableDesc {
  std::string name;
  int64_t num_embeddings = 0;  // 0: dynamic, any 64-bit id.
  uint32_t dim = 0;
  uint32_t first_column = 0;  // Of a column block of a wider table: the number of its column 0 there.
  uint32_t logical_dim = 0;   // Width of that table; else dim.
  RowType type = RowType::F32;
  OptimizerKind optimizer = OptimizerKind::ROWWISE_ADAGRAD;
  WeightDecayMode decay_mode = WeightDecayMode::NONE;
  float eps = 0, weight_decay = 0, initial_accumulator = 0;
  double beta1 = 0, beta2 = 0;  // As given: 1 - beta loses four digits where beta is a float first.
  uint64_t seed = 0;
  InitRange init;
  uint32_t log2_blocks = 0;
  // Filled by the store.
  uint32_t index = 0;
  uint32_t arena = 0;
  uint32_t slot_width = 0;
};

}  // namespace shoal
