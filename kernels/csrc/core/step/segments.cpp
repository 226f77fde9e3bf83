// Backward: the gradient of a unique row is the sum over its positions, in position order, of its bags' gradients.
//
// The order of additions is fixed and independent of threads and placement: a row with at most kSegment positions is
// summed from left to right; a longer one is cut into segments of kSegment positions, each summed from left to right,
// and the segments' sums are added from left to right. Positions are brought together by a stable counting sort.
#include <algorithm>
#include <cstring>

#include "core/step/lookup.h"
#include "core/step/simd.h"

namespace shoal::step {
namespace {

constexpr int64_t kSegment = 512;
constexpr int64_t kEntriesAhead = 12;  // gradients prefetched ahead, also those of the rows that follow
constexpr int64_t kRowsAhead = 8;
constexpr int64_t kRowsPerTask = 512;

int bit_width(uint64_t n) { return n ? 64 - __builtin_clzll(n) : 0; }

// Sums entries [begin, end) of one row into `sum`; `grad_of(entry)` is the address of its first column. Gradients of
// entries before `limit` are worth prefetching.
template <bool kScaled, class GradOf>
void sum_entries(const uint32_t* entries, const float* scales, int64_t begin, int64_t end, int64_t limit, int dim,
                 GradOf&& grad_of, float* sum) {
  auto look_ahead = [&](int64_t e, int column) {
    if (column == 0 && e + kEntriesAhead < limit) prefetch_bytes(grad_of(entries[e + kEntriesAhead]), dim * int64_t{4});
  };
  for_each_chunk(
      dim,
      [&](auto chunk, int column) {
        constexpr int kVectors = decltype(chunk)::kCount;
        if constexpr (kVectors == 0) {
          v4 acc = load4(grad_of(entries[begin]) + column);
          if (kScaled) acc = acc * scales[begin];
          for (int64_t e = begin + 1; e < end; ++e) {
            const v4 x = load4(grad_of(entries[e]) + column);
            acc = acc + (kScaled ? x * scales[e] : x);
          }
          store4(sum + column, acc);
        } else {
          v8 acc[kVectors];
          const float* first = grad_of(entries[begin]) + column;
          look_ahead(begin, column);
          for (int v = 0; v < kVectors; ++v) acc[v] = load8(first + 8 * v);
          if (kScaled)
            for (int v = 0; v < kVectors; ++v) acc[v] = acc[v] * splat8(scales[begin]);
          for (int64_t e = begin + 1; e < end; ++e) {
            const float* x = grad_of(entries[e]) + column;
            look_ahead(e, column);
            for (int v = 0; v < kVectors; ++v)
              acc[v] = acc[v] + (kScaled ? load8(x + 8 * v) * splat8(scales[e]) : load8(x + 8 * v));
          }
          for (int v = 0; v < kVectors; ++v) store8(sum + column + 8 * v, acc[v]);
        }
      },
      [&](int column) {
        float acc = grad_of(entries[begin])[column] * (kScaled ? scales[begin] : 1.f);
        for (int64_t e = begin + 1; e < end; ++e)
          acc = acc + grad_of(entries[e])[column] * (kScaled ? scales[e] : 1.f);
        sum[column] = acc;
      });
}

}  // namespace

void Lookup::segment_sum(const float* const* grads, const int64_t* destinations) {
  std::copy(grads, grads + plan_->num_outputs(), grads_.begin());
  has_grads_ = true;
  sort_positions();
  sum_hot_rows();
  if (plan_->has_pooled_flow) {
    int64_t bytes = 0;
    for (const BagPart& part : bag_parts_[plan_->rank])
      bytes += part.bags * plan_->tables[plan_->features[part.feature].table].bag_grad_bytes;
    write_bag_grads(plan_->rank, own_grads_.grow(bytes));
  }
  write_sums(destinations);
}

void Lookup::write_sums(const int64_t* destinations) const {
  for (int p = 0; p < plan_->world_size; ++p) {
    if (p == plan_->rank || order_start_[p] == order_start_[p + 1] || !destinations[p]) continue;
    std::byte* out = reinterpret_cast<std::byte*>(destinations[p]);
    for (int64_t r = outgoing_.peer_start[p]; r < outgoing_.peer_start[p + 1]; ++r) {
      const Run& run = outgoing_.runs[r];
      const Table& table = plan_->tables[run.table];
      if (table.is_pooled) continue;
      plan_->threads->run((run.count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
        alignas(32) float space[kDimMax];
        const int64_t end = std::min(run.count, (task + 1) * kRowsPerTask);
        for (int64_t i = task * kRowsPerTask; i < end; ++i) {
          if (i + kRowsAhead < end) prefetch_row_grad(run.table, order_[run.start + i + kRowsAhead]);
          std::byte* wire = out + i * table.wire_grad_bytes;
          float* target = table.rounds_grads() ? space : reinterpret_cast<float*>(wire);
          const float* sum = sum_row(run.table, order_[run.start + i], target);
          if (table.rounds_grads())
            encode_wire(table.grads_codec, sum, table.dim, wire);
          else if (sum != target)
            std::memcpy(target, sum, table.dim * sizeof(float));
        }
      });
      out += run.count * table.wire_grad_bytes;
    }
    if (plan_->has_pooled_flow && !plan_->is_far(p)) write_bag_grads(p, out);
  }
}

void Lookup::write_straight_grads(const int64_t* destinations) const {
  for (int p = 0; p < plan_->world_size; ++p)
    if (outgoing_.bag_grad_bytes[p]) write_bag_grads(p, reinterpret_cast<std::byte*>(destinations[p]));
}

void Lookup::sort_positions() {
  ends_.grow(num_positions_);
  entries_.grow(num_positions_);
  scales_.grow(num_positions_);
  plan_->threads->run(plan_->num_tables(), [&](int64_t t, int) { sort_table(static_cast<int>(t)); });
}

void Lookup::sort_table(int t) {
  const Table& table = plan_->tables[t];
  if (table.is_pooled) return;
  const int64_t start = position_start_[t];
  int64_t grad_rows_max = batch_size_;
  for (int f : table.features)
    if (plan_->features[f].is_sequence()) grad_rows_max = std::max(grad_rows_max, feature_count_[f]);
  const int shift = shift_[t] = bit_width(static_cast<uint64_t>(std::max<int64_t>(grad_rows_max, 1) - 1));
  if (static_cast<uint64_t>(table.features.size()) << shift > uint64_t{1} << 32)
    throw std::invalid_argument("too many features and samples read one table");
  uint32_t end = static_cast<uint32_t>(start);
  for (int64_t u = start; u < start + num_unique_[t]; ++u) {
    const uint32_t count = unique_count_[u];
    ends_[u] = end;
    end += count;
  }
  const uint32_t dropped = static_cast<uint32_t>(num_positions_);
  uint32_t* const ends = ends_.data();
  uint32_t* const entries = entries_.data();
  const uint32_t* const inverse = inverse_.data();
  for (int f : table.features) {
    const Feature& feature = plan_->features[f];
    const uint32_t tag = static_cast<uint32_t>(static_cast<uint64_t>(feature.index_in_table) << shift);
    if (feature.is_sequence()) {
      for (int64_t i = 0; i < feature_count_[f]; ++i) {
        const uint32_t u = inverse[feature_start_[f] + i];
        if (u == dropped) continue;
        const uint32_t e = ends[u]++;
        entries[e] = tag | static_cast<uint32_t>(i);
        if (table.has_scaled_features) scales_[e] = 1.f;
      }
      continue;
    }
    const uint32_t* bags = bag_offsets_.data() + f * (batch_size_ + 1);
    if (!table.has_scaled_features) {
      for (int64_t b = 0; b < batch_size_; ++b) {
        for (uint32_t p = bags[b]; p < bags[b + 1]; ++p) {
          const uint32_t u = inverse[p];
          if (u != dropped) entries[ends[u]++] = tag | static_cast<uint32_t>(b);
        }
      }
      continue;
    }
    const float* weights = feature.is_weighted ? weights_ + value_start_[f] - feature_start_[f] : nullptr;
    for (int64_t b = 0; b < batch_size_; ++b) {
      const int64_t kept = std::count_if(inverse + bags[b], inverse + bags[b + 1],
                                         [&](uint32_t u) { return u != dropped; });
      const float scale = feature.pooling == Pooling::kMean && kept > 1 ? 1.f / static_cast<float>(kept) : 1.f;
      for (uint32_t p = bags[b]; p < bags[b + 1]; ++p) {
        const uint32_t u = inverse[p];
        if (u == dropped) continue;
        const uint32_t e = ends[u]++;
        entries[e] = tag | static_cast<uint32_t>(b);
        scales_[e] = weights ? weights[p] * scale : scale;
      }
    }
  }
}

// With several threads the segments of rows with many positions are tasks of their own; the arithmetic is the same.
void Lookup::sum_hot_rows() {
  hot_rows_.clear();
  if (plan_->threads->count() == 1) return;
  struct Piece {
    int table;
    int64_t begin, end;
  };
  std::vector<Piece> pieces;
  std::vector<int64_t> first_piece;
  std::vector<int> tables;
  int64_t sum_floats = 0;
  for (int t = 0; t < plan_->num_tables(); ++t) {
    if (plan_->tables[t].is_pooled) continue;
    for (int64_t u = position_start_[t]; u < position_start_[t] + num_unique_[t]; ++u) {
      if (unique_count_[u] <= kSegment) continue;
      hot_rows_.push_back({static_cast<uint32_t>(u), sum_floats});
      first_piece.push_back(static_cast<int64_t>(pieces.size()));
      tables.push_back(t);
      const int64_t begin = begin_of(t, u), end = ends_[u];
      for (int64_t e = begin; e < end; e += kSegment) {
        pieces.push_back({t, e, std::min(e + kSegment, end)});
        sum_floats += plan_->tables[t].dim;
      }
    }
  }
  if (hot_rows_.empty()) return;
  first_piece.push_back(static_cast<int64_t>(pieces.size()));
  float* sums = hot_sums_.grow(sum_floats);
  plan_->threads->run(static_cast<int64_t>(pieces.size()), [&](int64_t i, int) {
    const size_t row = std::upper_bound(first_piece.begin(), first_piece.end(), i) - first_piece.begin() - 1;
    const int dim = plan_->tables[pieces[i].table].dim;
    sum_range(pieces[i].table, pieces[i].begin, pieces[i].end,
              sums + hot_rows_[row].sum_offset + (i - first_piece[row]) * dim);
  });
  plan_->threads->run(static_cast<int64_t>(hot_rows_.size()), [&](int64_t row, int) {
    const int dim = plan_->tables[tables[row]].dim;
    float* sum = sums + hot_rows_[row].sum_offset;
    for (int64_t i = 1; i < first_piece[row + 1] - first_piece[row]; ++i)
      for (int d = 0; d < dim; ++d) sum[d] = sum[d] + sum[i * dim + d];
  });
}

void Lookup::sum_range(int t, int64_t begin, int64_t end, float* sum) const {
  const Table& table = plan_->tables[t];
  const uint32_t* entries = entries_.data();
  const float* scales = scales_.data();
  const int64_t limit = std::max(end, look_ahead_end(t));
  auto run = [&](auto&& grad_of) {
    if (table.has_scaled_features)
      sum_entries<true>(entries, scales, begin, end, limit, table.dim, grad_of, sum);
    else
      sum_entries<false>(entries, scales, begin, end, limit, table.dim, grad_of, sum);
  };
  if (table.features.size() == 1) {
    const Feature& feature = plan_->features[table.features[0]];
    const float* base = grads_[feature.output] + feature.column;
    const int64_t stride = plan_->output_strides[feature.output];
    run([=](uint32_t entry) { return base + entry * stride; });
  } else {
    run([this, t](uint32_t entry) { return grad_of(t, entry); });
  }
}

const float* Lookup::grad_of(int t, uint32_t entry) const {
  const Table& table = plan_->tables[t];
  const int shift = shift_[t];
  const Feature& feature = plan_->features[table.features[static_cast<uint64_t>(entry) >> shift]];
  const uint64_t row = entry & ((uint64_t{1} << shift) - 1);
  return grads_[feature.output] + feature.column + row * plan_->output_strides[feature.output];
}

// Rows of a table with one owner are summed in the order of their entries, so that the entries of the rows that follow
// are the ones needed next; otherwise callers prefetch the first entry of a later row.
int64_t Lookup::look_ahead_end(int t) const {
  const int64_t n = num_unique_[t];
  return plan_->tables[t].has_one_owner && n ? int64_t{ends_[position_start_[t] + n - 1]} : 0;
}

void Lookup::prefetch_row_grad(int t, int64_t u) const {
  if (plan_->tables[t].has_one_owner) return;
  prefetch_bytes(grad_of(t, entries_[begin_of(t, u)]), plan_->tables[t].dim * int64_t{4});
}

const float* Lookup::sum_row(int t, int64_t u, float* space) const {
  const Table& table = plan_->tables[t];
  const int64_t begin = begin_of(t, u), end = ends_[u];
  if (end - begin == 1 && !table.has_scaled_features) {
    if (begin + kEntriesAhead < look_ahead_end(t))
      prefetch_bytes(grad_of(t, entries_[begin + kEntriesAhead]), table.dim * int64_t{4});
    return grad_of(t, entries_[begin]);
  }
  if (end - begin <= kSegment) {
    sum_range(t, begin, end, space);
    return space;
  }
  if (!hot_rows_.empty()) {
    const auto hot = std::lower_bound(hot_rows_.begin(), hot_rows_.end(), u,
                                      [](const HotRow& row, int64_t number) { return row.number < number; });
    return hot_sums_.data() + hot->sum_offset;
  }
  alignas(32) float segment[kDimMax];
  sum_range(t, begin, begin + kSegment, space);
  for (int64_t e = begin + kSegment; e < end; e += kSegment) {
    sum_range(t, e, std::min(e + kSegment, end), segment);
    for (int d = 0; d < table.dim; ++d) space[d] = space[d] + segment[d];
  }
  return space;
}

}  // namespace shoal::step
