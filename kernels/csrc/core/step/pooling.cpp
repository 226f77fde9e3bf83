// Pooling: rows -> bags (SUM, MEAN, weighted) or sequences, straight from the arena for local rows and from the
// received message for others; and the gradient of per-sample weights.
#include <algorithm>
#include <cstring>

#include "core/step/lookup.h"
#include "core/step/simd.h"

namespace shoal::step {
namespace {

constexpr int64_t kOutputBlockBytes = 256 << 10;  // a block of output rows is written while it is in L2
// Wide outputs: fewer samples than this a block, and a visit to a feature is over before its first row has arrived.
// Measured at 1,000 features of 16 columns: blocks of 64 samples pool a quarter faster than blocks of 8.
constexpr int64_t kBlockSamplesMin = 64;
// An output beyond this will not be in a core's caches when its reader comes: it is written past them.
constexpr int64_t kStreamBytes = 16 << 20;
constexpr int64_t kSequenceBlock = 1024;
constexpr int64_t kBagsPerTask = 256;
constexpr int64_t kAhead = 10;  // rows prefetched ahead

// Reads rows of a float32 table: local and received rows look alike.
struct PlainRows {
  const uintptr_t* addresses;
  int dim;
  const float* read(uint32_t u, float*) const { return reinterpret_cast<const float*>(addresses[u]); }
};

// Reads rows of a low-precision table: local ones are decoded, received ones are float32 already.
struct EncodedRows {
  const uintptr_t* addresses;
  int dim;
  RowType type;
  const float* read(uint32_t u, float* space) const {
    const uintptr_t address = addresses[u];
    if (!(address & kEncodedTag)) return reinterpret_cast<const float*>(address);
    decode_row(type, reinterpret_cast<const std::byte*>(address & ~kEncodedTag), dim, space);
    return space;
  }
};

// One feature's bags [begin, end) into rows of `output`.
struct BagJob {
  const uint32_t* inverse;
  const uint32_t* bags;       // [batch + 1]
  const float* weights;       // of the feature's first position (index: position), or null
  uint32_t dropped_number;
  bool has_dropped;
  bool is_mean;
  int64_t begin, end;
  float* output;              // the feature's first column in row 0
  int64_t stride;
  const uint32_t* next_inverse;  // rows that the caller needs next, to prefetch
  int64_t next_count;
  bool can_stream;
};

template <class Rows>
inline void prefetch_ahead(const Rows& rows, const BagJob& job, int64_t position, int64_t last) {
  const int64_t ahead = position + kAhead;
  uint32_t u;
  if (ahead < last) {
    u = job.inverse[ahead];
  } else {
    if (ahead - last >= job.next_count) return;
    u = job.next_inverse[ahead - last];
  }
  prefetch_bytes(reinterpret_cast<const void*>(rows.addresses[u] & ~kEncodedTag), rows.dim * int64_t{4});
}

int64_t kept_in_bag(const BagJob& job, int64_t first, int64_t last) {
  if (!job.has_dropped) return last - first;
  return std::count_if(job.inverse + first, job.inverse + last, [&](uint32_t u) { return u != job.dropped_number; });
}

// Sums a bag of float32 rows column chunk by column chunk, in position order.
template <bool kWeighted, bool kStream>
void sum_bag(const PlainRows& rows, const BagJob& job, int64_t first, int64_t last, float scale, float* out) {
  const uint32_t* inverse = job.inverse;
  const float* weights = job.weights;
  auto row = [&](int64_t p) { return reinterpret_cast<const float*>(rows.addresses[inverse[p]]); };
  for_each_chunk(
      rows.dim,
      [&](auto chunk, int column) {
        constexpr int kVectors = decltype(chunk)::kCount;
        if constexpr (kVectors == 0) {
          v4 acc = load4(row(first) + column);
          if (kWeighted) acc = acc * weights[first];
          for (int64_t p = first + 1; p < last; ++p) {
            const v4 x = load4(row(p) + column);
            acc = acc + (kWeighted ? x * weights[p] : x);
          }
          store4(out + column, scale == 1.f ? acc : acc * scale);
        } else {
          v8 acc[kVectors];
          for (int v = 0; v < kVectors; ++v) acc[v] = load8(row(first) + column + 8 * v);
          if (kWeighted)
            for (int v = 0; v < kVectors; ++v) acc[v] = acc[v] * splat8(weights[first]);
          for (int64_t p = first + 1; p < last; ++p) {
            const float* x = row(p) + column;
            for (int v = 0; v < kVectors; ++v)
              acc[v] = acc[v] + (kWeighted ? load8(x + 8 * v) * splat8(weights[p]) : load8(x + 8 * v));
          }
          for (int v = 0; v < kVectors; ++v) {
            const v8 result = scale == 1.f ? acc[v] : acc[v] * splat8(scale);
            if constexpr (kStream)
              stream8(out + column + 8 * v, result);
            else
              store8(out + column + 8 * v, result);
          }
        }
      },
      [&](int column) {
        float acc = row(first)[column] * (kWeighted ? weights[first] : 1.f);
        for (int64_t p = first + 1; p < last; ++p) acc = acc + row(p)[column] * (kWeighted ? weights[p] : 1.f);
        out[column] = scale == 1.f ? acc : acc * scale;
      });
}

// The same sum, row by row: for rows that must be decoded.
template <bool kWeighted, bool kStream>
void sum_bag(const EncodedRows& rows, const BagJob& job, int64_t first, int64_t last, float scale, float* out) {
  alignas(32) float space[kDimMax];
  for (int64_t p = first; p < last; ++p) {
    const float* x = rows.read(job.inverse[p], space);
    const float w = kWeighted ? job.weights[p] : 1.f;
    if (p == first)
      for (int d = 0; d < rows.dim; ++d) out[d] = kWeighted ? x[d] * w : x[d];
    else
      for (int d = 0; d < rows.dim; ++d) out[d] = out[d] + (kWeighted ? x[d] * w : x[d]);
  }
  if (scale != 1.f)
    for (int d = 0; d < rows.dim; ++d) out[d] = out[d] * scale;
}

template <bool kWeighted, bool kStream, class Rows>
void pool_bags(const Rows& rows, const BagJob& job) {
  const int64_t last_position = job.bags[job.end];
  for (int64_t b = job.begin; b < job.end; ++b) {
    const int64_t first = job.bags[b], last = job.bags[b + 1];
    float* out = job.output + b * job.stride;
    for (int64_t p = first; p < last; ++p) prefetch_ahead(rows, job, p, last_position);
    if (first == last) {
      std::memset(out, 0, rows.dim * sizeof(float));
      continue;
    }
    const int64_t kept = job.is_mean ? kept_in_bag(job, first, last) : 1;
    const float scale = job.is_mean && kept > 1 ? 1.f / static_cast<float>(kept) : 1.f;
    sum_bag<kWeighted, kStream>(rows, job, first, last, scale, out);
  }
  if (kStream) stream_fence();
}

template <class Rows>
void pool_bags(const Rows& rows, const BagJob& job) {
  if (job.weights)
    pool_bags<true, false>(rows, job);
  else if (job.can_stream)
    pool_bags<false, true>(rows, job);
  else
    pool_bags<false, false>(rows, job);
}

template <class Rows>
void copy_rows(const Rows& rows, const uint32_t* inverse, int64_t begin, int64_t end, float* output, int64_t stride) {
  alignas(32) float space[kDimMax];
  for (int64_t p = begin; p < end; ++p) {
    if (p + kAhead < end)
      prefetch_bytes(reinterpret_cast<const void*>(rows.addresses[inverse[p + kAhead]] & ~kEncodedTag),
                     rows.dim * int64_t{4});
    std::memcpy(output + p * stride, rows.read(inverse[p], space), rows.dim * sizeof(float));
  }
}

float dot(const float* a, const float* b, int dim) {
  v8 acc = {};
  int d = 0;
  for (; d + 8 <= dim; d += 8) acc = fma8(load8(a + d), load8(b + d), acc);
  float sum = sum_lanes(acc);
  for (; d < dim; ++d) sum = __builtin_fmaf(a[d], b[d], sum);
  return sum;
}

}  // namespace

// Calls fn with the reader of a table's rows.
template <class Fn>
void Lookup::with_rows(int table, Fn&& fn) const {
  const int dim = plan_->tables[table].dim;
  const RowType type = plan_->tables[table].type;
  if (type == RowType::F32)
    fn(PlainRows{row_address_.data(), dim});
  else
    fn(EncodedRows{row_address_.data(), dim, type});
}

void Lookup::pool(const int64_t* sources, const int64_t* straight_sums, float* const* outputs) {
  point_at_remote_rows(sources);
  if (plan_->has_pooled_flow) {
    std::vector<const std::byte*> sums(plan_->world_size);
    for (int p = 0; p < plan_->world_size; ++p)
      if (p != plan_->rank)
        sums[p] = plan_->is_far(p) ? reinterpret_cast<const std::byte*>(straight_sums[p])
                                   : reinterpret_cast<const std::byte*>(sources[p]) + rows_bytes_in(p);
    int64_t own_bytes = 0;
    for (const BagPart& part : bag_parts_[plan_->rank])
      own_bytes += part.units * plan_->tables[plan_->features[part.feature].table].unit_bytes;
    std::byte* own = own_sums_.grow(own_bytes);
    write_partial_sums(plan_->rank, own);
    sums[plan_->rank] = own;
    add_partial_sums(std::move(sums), outputs);
  }
  for (int o = 0; o < plan_->num_outputs(); ++o) {
    if (plan_->pooled[o].empty()) continue;
    const int64_t stride = plan_->output_strides[o];
    // Every thread should have two blocks, as long as they are of 8 samples or more.
    const int64_t share = batch_size_ / (2 * plan_->threads->count()) / 8 * 8;
    const int64_t shortest = std::clamp<int64_t>(share, 8, kBlockSamplesMin);
    const int64_t block =
        std::clamp<int64_t>(kOutputBlockBytes / std::max<int64_t>(1, stride * 4) / 8 * 8, shortest, 4096);
    plan_->threads->run((batch_size_ + block - 1) / block, [&](int64_t task, int) {
      pool_block(o, task * block, std::min(batch_size_, (task + 1) * block), outputs[o]);
    });
  }
  for (int f = 0; f < plan_->num_features(); ++f) {
    const Feature& feature = plan_->features[f];
    if (!feature.is_sequence()) continue;
    const int64_t count = feature_count_[f];
    plan_->threads->run((count + kSequenceBlock - 1) / kSequenceBlock, [&](int64_t task, int) {
      with_rows(feature.table, [&](const auto& rows) {
        copy_rows(rows, inverse_.data() + feature_start_[f], task * kSequenceBlock,
                  std::min(count, (task + 1) * kSequenceBlock), outputs[feature.output] + feature.column,
                  plan_->output_strides[feature.output]);
      });
    });
  }
}

// Bags [begin, end) of all features of one pooled output.
void Lookup::pool_block(int output, int64_t begin, int64_t end, float* out) const {
  const std::vector<int>& features = plan_->pooled[output];
  const uint32_t* all_bags = bag_offsets_.data();
  for (size_t i = 0; i < features.size(); ++i) {
    const int f = features[i];
    const Feature& feature = plan_->features[f];
    if (plan_->tables[feature.table].is_pooled) continue;
    const uint32_t* bags = all_bags + f * (batch_size_ + 1);
    BagJob job{inverse_.data(),
               bags,
               feature.is_weighted ? weights_ + value_start_[f] - feature_start_[f] : nullptr,
               static_cast<uint32_t>(num_positions_),
               dropped_[f] > 0,
               feature.pooling == Pooling::kMean,
               begin,
               end,
               out + feature.column,
               plan_->output_strides[output],
               nullptr,
               0,
               false};
    const int64_t stride_bytes = 4 * job.stride;
    job.can_stream = batch_size_ * stride_bytes > kStreamBytes && plan_->tables[feature.table].dim % 8 == 0 &&
                     (reinterpret_cast<uintptr_t>(job.output) | static_cast<uintptr_t>(stride_bytes)) % 32 == 0;
    const bool has_next = i + 1 < features.size();
    const int64_t next_begin = has_next ? begin : end;
    const int64_t next_end = has_next ? end : std::min(batch_size_, 2 * end - begin);
    const uint32_t* next_bags = all_bags + features[has_next ? i + 1 : 0] * (batch_size_ + 1);
    job.next_inverse = inverse_.data() + next_bags[next_begin];
    job.next_count = static_cast<int64_t>(next_bags[next_end]) - next_bags[next_begin];
    with_rows(feature.table, [&](const auto& rows) { pool_bags(rows, job); });
  }
}

void Lookup::weight_grad(const float* const* grads, float* out) {
  for (int f = 0; f < plan_->num_features(); ++f) {
    const Feature& feature = plan_->features[f];
    if (!feature.is_weighted) continue;
    const int64_t stride = plan_->output_strides[feature.output];
    const float* grad = grads[feature.output] + feature.column;
    const uint32_t* bags = bag_offsets_.data() + f * (batch_size_ + 1);
    const uint32_t dropped = static_cast<uint32_t>(num_positions_);
    float* feature_out = out + value_start_[f] - feature_start_[f];
    plan_->threads->run((batch_size_ + kBagsPerTask - 1) / kBagsPerTask, [&](int64_t task, int) {
      alignas(32) float space[kDimMax];
      const int64_t end = std::min(batch_size_, (task + 1) * kBagsPerTask);
      with_rows(feature.table, [&](const auto& rows) {
        for (int64_t b = task * kBagsPerTask; b < end; ++b) {
          const int64_t kept = std::count_if(inverse_.data() + bags[b], inverse_.data() + bags[b + 1],
                                             [&](uint32_t u) { return u != dropped; });
          const float scale = feature.pooling == Pooling::kMean && kept > 1 ? 1.f / static_cast<float>(kept) : 1.f;
          for (int64_t p = bags[b]; p < bags[b + 1]; ++p) {
            if (inverse_[p] == dropped) continue;
            feature_out[p] += dot(grad + b * stride, rows.read(inverse_[p], space), rows.dim) * scale;
          }
        }
      });
    });
  }
}

}  // namespace shoal::step
