// Sparse optimizers: one update of one row, inline, so that they fuse into the loops that sum gradients.
//
// Formulas (kernels/spec.py OptimizerSpec; torch twins in kernels/optim.py), all in float32, operations in the order
// written, no fused multiply-add. Element-wise operations are IEEE exact, so a compiler may vectorise them at will; the
// one reduction, mean(g * g), is written over 8 lanes and a fixed tree.
//   decay    L2: g = g + wd * w;  DECOUPLED: w = w - (lr * wd) * w, before the update
//   SGD      w = w - lr * g
//   ADAGRAD  v = v + g * g;  w = w - (lr * g) / (sqrt(v) + eps)
//   ROWWISE  m = m + mean(g * g);  w = w - (lr / (sqrt(m) + eps)) * g
//   ADAM     m = b1 * m + (1 - b1) * g;  v = b2 * v + ((1 - b2) * g) * g
//            w = w - ((lr / (1 - b1^t)) * m) / (sqrt(v * (1 / (1 - b2^t))) + eps)
#pragma once

#include <cmath>

#include "core/store/init.h"
#include "core/store/record.h"

namespace shoal {

// Scalars of one table in one step. `step` counts from 1 and is Adam's t.
struct StepScalars {
  float lr = 0, lr_decay = 0, adam_lr = 0, adam_inverse = 0;
  float eps = 0, beta1 = 0, beta2 = 0, rest1 = 0, rest2 = 0, weight_decay = 0;
  uint32_t step = 0;
  WeightDecayMode decay_mode = WeightDecayMode::NONE;
};

StepScalars make_scalars(const TableDesc& table, uint32_t step, float lr);

inline Lanes load_lanes(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, 32);
  return lanes;
}

// The fixed tree: neighbours at distance 4, then 2, then 1.
inline float sum_lanes(const Lanes& a) {
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

// Sum of squares: element i goes to lane i mod 8, in order of i.
inline float sum_squares(const float* values, uint32_t count) {
  Lanes sums = {};
  uint32_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const Lanes x = load_lanes(values + i);
    sums += x * x;
  }
  for (uint32_t lane = 0; i < count; ++i, ++lane) sums[lane] += values[i] * values[i];
  return sum_lanes(sums);
}

// Update `w` (float32) and the optimizer state with the summed gradient `g`. DIM > 0 fixes the width at compile time.
// `scratch` holds dim floats and is used by L2 decay only.
template <OptimizerKind KIND, uint32_t DIM = 0>
inline void update_weights(const StepScalars& s, uint32_t dim_, float* __restrict w, float* __restrict state,
                           const float* __restrict g, float* __restrict scratch) {
  const uint32_t dim = DIM > 0 ? DIM : dim_;
  if (s.decay_mode == WeightDecayMode::L2) {
    for (uint32_t d = 0; d < dim; ++d) scratch[d] = g[d] + s.weight_decay * w[d];
    g = scratch;
  } else if (s.decay_mode == WeightDecayMode::DECOUPLED) {
    for (uint32_t d = 0; d < dim; ++d) w[d] = w[d] - s.lr_decay * w[d];
  }
  if constexpr (KIND == OptimizerKind::SGD) {
    for (uint32_t d = 0; d < dim; ++d) w[d] = w[d] - s.lr * g[d];
  } else if constexpr (KIND == OptimizerKind::ADAGRAD) {
    for (uint32_t d = 0; d < dim; ++d) {
      state[d] = state[d] + g[d] * g[d];
      w[d] = w[d] - (s.lr * g[d]) / (std::sqrt(state[d]) + s.eps);
    }
  } else if constexpr (KIND == OptimizerKind::ROWWISE_ADAGRAD) {
    state[0] = state[0] + sum_squares(g, dim) / static_cast<float>(dim);
    const float scale = s.lr / (std::sqrt(state[0]) + s.eps);
    for (uint32_t d = 0; d < dim; ++d) w[d] = w[d] - scale * g[d];
  } else {
    float* __restrict m = state;
    float* __restrict v = state + dim;
    for (uint32_t d = 0; d < dim; ++d) {
      m[d] = s.beta1 * m[d] + s.rest1 * g[d];
      v[d] = s.beta2 * v[d] + (s.rest2 * g[d]) * g[d];
      w[d] = w[d] - (s.adam_lr * m[d]) / (std::sqrt(v[d] * s.adam_inverse) + s.eps);
    }
  }
}

// ROWWISE on some columns of a row, whose mean(g * g) over all columns is given; `g` has had L2 decay.
inline void update_weights_rowwise(const StepScalars& s, uint32_t dim, float* __restrict w, float* __restrict state,
                                   const float* __restrict g, float mean_square) {
  if (s.decay_mode == WeightDecayMode::DECOUPLED)
    for (uint32_t d = 0; d < dim; ++d) w[d] = w[d] - s.lr_decay * w[d];
  state[0] = state[0] + mean_square;
  const float scale = s.lr / (std::sqrt(state[0]) + s.eps);
  for (uint32_t d = 0; d < dim; ++d) w[d] = w[d] - scale * g[d];
}

template <RowType TYPE>
inline void update_record_rowwise(const TableDesc& table, const RecordLayout& layout, const StepScalars& s,
                                  std::byte* record, const float* g, float mean_square, float* scratch) {
  std::byte* weights = record + layout.weights_offset;
  if constexpr (TYPE == RowType::F32) {
    update_weights_rowwise(s, layout.dim, reinterpret_cast<float*>(weights), slots(record), g, mean_square);
  } else {
    decode_row(TYPE, weights, layout.dim, scratch);
    update_weights_rowwise(s, layout.dim, scratch, slots(record), g, mean_square);
    encode_row(table, header(record)->id, s.step, scratch, weights);
  }
}

// The same as update_weights on a record of any row type.
template <OptimizerKind KIND, RowType TYPE, uint32_t DIM = 0>
inline void update_record(const TableDesc& table, const RecordLayout& layout, const StepScalars& s, std::byte* record,
                          const float* g, float* scratch) {
  const uint32_t dim = DIM > 0 ? DIM : layout.dim;
  std::byte* weights = record + layout.weights_offset;
  if constexpr (TYPE == RowType::F32) {
    update_weights<KIND, DIM>(s, dim, reinterpret_cast<float*>(weights), slots(record), g, scratch);
  } else {
    float* wide = scratch + dim;
    decode_row(TYPE, weights, dim, wide);
    update_weights<KIND, DIM>(s, dim, wide, slots(record), g, scratch);
    encode_row(table, header(record)->id, s.step, wide, weights);
  }
}

}  // namespace shoal
