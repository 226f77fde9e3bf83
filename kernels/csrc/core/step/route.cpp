// Route: batch -> positions -> unique ids per table -> order (owner, table, first occurrence).
#include <algorithm>
#include <cstring>
#include <mutex>

#include "core/step/lookup.h"

namespace shoal::step {
namespace {

constexpr int64_t kPositionsMax = (int64_t{1} << 31) - 2;
constexpr int kBatchOfIds = 32;  // ids hashed and prefetched together

int bit_width(uint64_t n) { return n ? 64 - __builtin_clzll(n) : 0; }

// An open-addressed set of local row numbers. An entry is 0 (empty) or (fingerprint << index_bits) | (number + 1), so
// that a 4-byte entry mostly answers without looking at the key: 82 k ids need 1 MB, which stays in L2.
struct Scratch {
  Buffer<uint32_t> entries;
  uint64_t mask = 0;
  int index_bits = 0;

  void reset(int64_t num_ids) {
    uint64_t capacity = 16;
    while (capacity < 2 * static_cast<uint64_t>(num_ids)) capacity <<= 1;
    std::memset(entries.grow(capacity), 0, capacity * sizeof(uint32_t));
    mask = capacity - 1;
    index_bits = bit_width(static_cast<uint64_t>(num_ids));
  }
};

Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

// What dedup of one feature's ids needs; all arrays are those of the feature's table.
struct DedupArrays {
  uint32_t* inverse;       // this feature's positions
  uint64_t* ids;           // from the table's first unique row
  uint32_t* counts;        // likewise
  uint16_t* owners;        // likewise, or null
  uint32_t first_unique;   // number of the table's first unique row
  uint32_t dropped_number;  // stands for a dropped id
};

struct DedupOutcome {
  int64_t num_dropped = 0, num_remapped = 0;
  int64_t bad_index = -1;  // first id outside the table under policy ERROR
};

template <class Value>
DedupOutcome dedup_feature(const Value* values, int64_t n, const Table& table, IdPolicy policy, Scratch& scratch,
                           const DedupArrays& out, int64_t* num_unique) {
  DedupOutcome outcome;
  const uint64_t last_id = table.last_id();
  const uint64_t mask = scratch.mask;
  const int index_bits = scratch.index_bits;
  const uint32_t index_mask = (uint32_t{1} << index_bits) - 1;
  uint32_t* const entries = scratch.entries.data();
  uint32_t unique = static_cast<uint32_t>(*num_unique);
  uint64_t ids[kBatchOfIds], hashes[kBatchOfIds];
  for (int64_t begin = 0; begin < n; begin += kBatchOfIds) {
    const int m = static_cast<int>(std::min<int64_t>(kBatchOfIds, n - begin));
    uint32_t drop_bits = 0;
    for (int j = 0; j < m; ++j) {
      uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(values[begin + j]));
      if (__builtin_expect(id > last_id, 0)) {
        if (policy == IdPolicy::kHash) {
          id = fmix64(id) % table.num_embeddings;
          ++outcome.num_remapped;
        } else if (policy == IdPolicy::kOov) {
          id = last_id;
          ++outcome.num_remapped;
        } else {
          if (policy == IdPolicy::kError && outcome.bad_index < 0) outcome.bad_index = begin + j;
          drop_bits |= uint32_t{1} << j;
          ++outcome.num_dropped;
        }
      }
      const uint64_t hash = fmix64(id);
      ids[j] = id;
      hashes[j] = hash;
      __builtin_prefetch(&entries[hash & mask], 1);
    }
    for (int j = 0; j < m; ++j) {
      if (__builtin_expect(drop_bits != 0, 0) && (drop_bits >> j & 1)) {
        out.inverse[begin + j] = out.dropped_number;
        continue;
      }
      const uint32_t fingerprint = static_cast<uint32_t>(hashes[j] >> 32) << index_bits;
      uint64_t slot = hashes[j] & mask;
      uint32_t number;
      for (;;) {
        const uint32_t entry = entries[slot];
        if (entry == 0) {
          number = unique++;
          entries[slot] = fingerprint | (number + 1);
          out.ids[number] = ids[j];
          out.counts[number] = 1;
          if (out.owners) out.owners[number] = static_cast<uint16_t>(table.owner_of(hashes[j]));
          break;
        }
        if (((entry ^ fingerprint) & ~index_mask) == 0) {
          number = (entry & index_mask) - 1;
          if (out.ids[number] == ids[j]) {
            ++out.counts[number];
            break;
          }
        }
        slot = (slot + 1) & mask;
      }
      out.inverse[begin + j] = out.first_unique + number;
    }
  }
  *num_unique = unique;
  return outcome;
}

}  // namespace

Lookup::Lookup(StepPlan* plan)
    : plan_(plan),
      position_start_(plan->num_tables() + 1),
      feature_start_(plan->num_features()),
      feature_count_(plan->num_features()),
      value_start_(plan->num_features()),
      dropped_(plan->num_features()),
      remapped_(plan->num_features()),
      num_unique_(plan->num_tables()),
      order_start_(plan->world_size + 1),
      shift_(plan->num_tables()),
      grads_(plan->num_outputs()) {
  for (RunList* list : {&outgoing_, &incoming_}) {
    list->peer_start.assign(plan->world_size + 1, 0);
    list->row_bytes.assign(plan->world_size, 0);
    list->grad_bytes.assign(plan->world_size, 0);
    list->sum_bytes.assign(plan->world_size, 0);
    list->bag_grad_bytes.assign(plan->world_size, 0);
  }
}

RouteStatus Lookup::route(const BatchView& batch, bool is_training) {
  is_training_ = is_training;
  batch_size_ = batch.batch_size;
  num_values_ = batch.num_values;
  weights_ = batch.weights;
  has_grads_ = false;
  if (batch.offsets_are_wide) {
    place_positions<int64_t>(batch);
    return batch.values_are_wide ? route_typed<int64_t, int64_t>(batch) : route_typed<int32_t, int64_t>(batch);
  }
  place_positions<int32_t>(batch);
  return batch.values_are_wide ? route_typed<int64_t, int32_t>(batch) : route_typed<int32_t, int32_t>(batch);
}

template <class Offset>
void Lookup::place_positions(const BatchView& batch) {
  const Offset* offsets = static_cast<const Offset*>(batch.offsets);
  const int64_t B = batch.batch_size;
  int64_t position = 0;
  for (int t = 0; t < plan_->num_tables(); ++t) {
    position_start_[t] = position;
    for (int f : plan_->tables[t].features) {
      const int64_t column = batch.key_columns[f];
      if (column >= batch.num_columns) throw std::invalid_argument("key_columns names a column that does not exist");
      const int64_t first = column < 0 ? 0 : static_cast<int64_t>(offsets[column * B]);
      const int64_t last = column < 0 ? 0 : static_cast<int64_t>(offsets[column * B + B]);
      if (first < 0 || last < first || last > batch.num_values)
        throw std::invalid_argument("offsets of column " + std::to_string(column) + " leave the values");
      feature_start_[f] = position;
      feature_count_[f] = last - first;
      value_start_[f] = first;
      if (plan_->features[f].is_weighted && last > first && !batch.weights)
        throw std::invalid_argument("feature " + std::to_string(f) + " is weighted but the batch has no weights");
      position += last - first;
    }
  }
  if (position > kPositionsMax) throw std::invalid_argument("more than 2^31 - 2 ids in one batch of one rank");
  for (const Table& table : plan_->tables) {
    if (table.leader < 0) continue;
    const std::vector<int>& leaders = plan_->tables[table.leader].features;
    if (!std::equal(leaders.begin(), leaders.end(), table.features.begin(), table.features.end(),
                    [&](int a, int b) { return batch.key_columns[a] == batch.key_columns[b]; }))
      throw std::invalid_argument("the column blocks of a table must read the same columns of the batch");
  }
  position_start_[plan_->num_tables()] = num_positions_ = position;
  bag_offsets_.grow(static_cast<size_t>(plan_->num_features()) * (B + 1));
}

template <class Value, class Offset>
void Lookup::dedup_table(const BatchView& batch, int t, int64_t* bad_index) {
  const int64_t B = batch.batch_size;
  const Table& table = plan_->tables[t];
  Scratch& scratch = thread_scratch();
  const int64_t start = position_start_[t];
  scratch.reset(position_start_[t + 1] - start);
  num_unique_[t] = 0;
  for (int f : table.features) {
    const int64_t first = feature_start_[f];
    uint32_t* bags = bag_offsets_.data() + f * (B + 1);
    if (batch.key_columns[f] < 0) {
      std::fill(bags, bags + B + 1, static_cast<uint32_t>(first));
    } else {
      const Offset* offsets = static_cast<const Offset*>(batch.offsets) + batch.key_columns[f] * B;
      const int64_t shift = first - value_start_[f];
      bool is_ascending = true;
      bags[0] = static_cast<uint32_t>(first);
      for (int64_t b = 0; b < B; ++b) {
        is_ascending &= offsets[b] <= offsets[b + 1];
        bags[b + 1] = static_cast<uint32_t>(offsets[b + 1] + shift);
      }
      if (!is_ascending) throw std::invalid_argument("offsets of feature " + std::to_string(f) + " descend");
    }
    const DedupArrays out{inverse_.data() + first,
                          unique_ids_.data() + start,
                          unique_count_.data() + start,
                          table.has_one_owner ? nullptr : unique_owner_.data() + start,
                          static_cast<uint32_t>(start),
                          static_cast<uint32_t>(num_positions_)};
    const DedupOutcome outcome =
        dedup_feature(static_cast<const Value*>(batch.values) + value_start_[f], feature_count_[f], table,
                      plan_->features[f].policy, scratch, out, &num_unique_[t]);
    dropped_[f] = outcome.num_dropped;
    remapped_[f] = outcome.num_remapped;
    bad_index[f] = outcome.bad_index;
  }
}

// A further column block of a table: its rows are the leader's, numbered from its own first position.
void Lookup::copy_leader(int t) {
  const Table& table = plan_->tables[t];
  const Table& leader = plan_->tables[table.leader];
  const int64_t start = position_start_[t], leader_start = position_start_[table.leader];
  const int64_t n = num_unique_[t] = num_unique_[table.leader];
  const uint32_t shift = static_cast<uint32_t>(start - leader_start), dropped = static_cast<uint32_t>(num_positions_);
  for (size_t i = 0; i < table.features.size(); ++i) {
    const int f = table.features[i], from = leader.features[i];
    const uint32_t* bags = bag_offsets_.data() + from * (batch_size_ + 1);
    for (int64_t b = 0; b <= batch_size_; ++b) bag_offsets_[f * (batch_size_ + 1) + b] = bags[b] + shift;
    dropped_[f] = dropped_[from];
    remapped_[f] = remapped_[from];
  }
  const int64_t num_positions = position_start_[t + 1] - start;
  for (int64_t p = 0; p < num_positions; ++p) {
    const uint32_t u = inverse_[leader_start + p];
    inverse_[start + p] = u == dropped ? dropped : u + shift;
  }
  std::copy_n(unique_ids_.data() + leader_start, n, unique_ids_.data() + start);
  std::copy_n(unique_count_.data() + leader_start, n, unique_count_.data() + start);
  if (table.has_one_owner) return;
  for (int64_t i = 0; i < n; ++i)
    unique_owner_[start + i] = static_cast<uint16_t>(table.owner_of(fmix64(unique_ids_[start + i])));
}

int64_t Lookup::sum_over_ids(const std::vector<int64_t>& per_feature) const {
  int64_t total = 0;
  for (int f = 0; f < plan_->num_features(); ++f)
    if (plan_->tables[plan_->features[f].table].leader < 0) total += per_feature[f];
  return total;
}

int64_t Lookup::num_positions() const { return sum_over_ids(feature_count_); }

int64_t Lookup::num_unique() const {
  int64_t total = 0;
  for (int t = 0; t < plan_->num_tables(); ++t)
    if (plan_->tables[t].leader < 0) total += num_unique_[t];
  return total;
}

template <class Value, class Offset>
RouteStatus Lookup::route_typed(const BatchView& batch) {
  const bool needs_owners = std::any_of(plan_->tables.begin(), plan_->tables.end(),
                                        [](const Table& t) { return !t.has_one_owner; });
  inverse_.grow(num_positions_);
  unique_ids_.grow(num_positions_);
  unique_count_.grow(num_positions_);
  if (needs_owners) unique_owner_.grow(num_positions_);
  std::vector<int64_t> bad_index(plan_->num_features(), -1);
  plan_->threads->run(plan_->num_tables(), [&](int64_t t, int) {
    if (plan_->tables[t].leader < 0) dedup_table<Value, Offset>(batch, static_cast<int>(t), bad_index.data());
  });
  if (plan_->has_column_blocks)
    plan_->threads->run(plan_->num_tables(), [&](int64_t t, int) {
      if (plan_->tables[t].leader >= 0) copy_leader(static_cast<int>(t));
    });
  order_by_owner();
  if (plan_->has_pooled_flow) cut_bags();
  for (int f = 0; f < plan_->num_features(); ++f) {
    if (bad_index[f] < 0) continue;
    const int64_t position = value_start_[f] + bad_index[f];
    return {1, f, static_cast<int64_t>(static_cast<const Value*>(batch.values)[position]), position};
  }
  return {};
}

// A stable counting sort of the unique rows by owner: (table, first occurrence) order survives within each owner.
void Lookup::order_by_owner() {
  const int W = plan_->world_size;
  num_unique_total_ = 0;
  std::fill(order_start_.begin(), order_start_.end(), 0);
  for (int t = 0; t < plan_->num_tables(); ++t) {
    const Table& table = plan_->tables[t];
    num_unique_total_ += num_unique_[t];
    if (table.has_one_owner) {
      order_start_[table.owners[0] + 1] += num_unique_[t];
      continue;
    }
    const uint16_t* owners = unique_owner_.data() + position_start_[t];
    for (int64_t i = 0; i < num_unique_[t]; ++i) ++order_start_[owners[i] + 1];
  }
  for (int p = 0; p < W; ++p) order_start_[p + 1] += order_start_[p];
  order_.grow(num_unique_total_);
  std::vector<int64_t> cursor(order_start_.begin(), order_start_.end() - 1);
  for (int t = 0; t < plan_->num_tables(); ++t) {
    const Table& table = plan_->tables[t];
    const uint32_t start = static_cast<uint32_t>(position_start_[t]);
    if (table.has_one_owner) {
      uint32_t* order = order_.data() + cursor[table.owners[0]];
      for (int64_t i = 0; i < num_unique_[t]; ++i) order[i] = start + static_cast<uint32_t>(i);
      cursor[table.owners[0]] += num_unique_[t];
      continue;
    }
    const uint16_t* owners = unique_owner_.data() + start;
    for (int64_t i = 0; i < num_unique_[t]; ++i) order_[cursor[owners[i]]++] = start + static_cast<uint32_t>(i);
  }
  // Cut each peer's rows into one run per table.
  outgoing_.runs.clear();
  for (int p = 0; p < W; ++p) {
    outgoing_.peer_start[p] = static_cast<int64_t>(outgoing_.runs.size());
    outgoing_.row_bytes[p] = outgoing_.grad_bytes[p] = 0;
    int t = 0;
    for (int64_t i = order_start_[p]; i < order_start_[p + 1];) {
      while (order_[i] >= position_start_[t + 1]) ++t;
      const uint32_t* end = std::lower_bound(order_.data() + i, order_.data() + order_start_[p + 1],
                                             static_cast<uint32_t>(position_start_[t + 1]));
      const int64_t count = end - (order_.data() + i);
      outgoing_.runs.push_back({t, i, count});
      if (p != plan_->rank) {
        outgoing_.row_bytes[p] += count * plan_->tables[t].wire_row_bytes;
        outgoing_.grad_bytes[p] += count * plan_->tables[t].wire_grad_bytes;
      }
      i += count;
    }
  }
  outgoing_.peer_start[W] = static_cast<int64_t>(outgoing_.runs.size());
}

}  // namespace shoal::step
