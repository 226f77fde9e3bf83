#include "core/step/apply.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/step/mirrors.h"
#include "core/step/simd.h"

namespace shoal::step {
namespace {

constexpr int64_t kAhead = 8;  // rows prefetched ahead
constexpr int64_t kRowsPerTask = 1024;

// The widths for which the update is compiled with a constant width.
template <class Updater_>
inline void update_row(Updater_& updater, int dim, uint32_t slot, const float* gradient) {
  switch (dim) {
    case 16: return updater.template update<16>(slot, gradient);
    case 32: return updater.template update<32>(slot, gradient);
    case 64: return updater.template update<64>(slot, gradient);
    case 128: return updater.template update<128>(slot, gradient);
    default: return updater.update(slot, gradient);
  }
}

// The row as its codec gives it.
void round_trip(Codec codec, int dim, float* row) {
  alignas(32) std::byte wire[4 * kDimMax];
  encode_wire(codec, row, dim, wire);
  decode_wire(codec, wire, dim, row);
}

}  // namespace

// Rows of a merge: the contributions of each distinct slot, in order.
struct Merge {
  Buffer<uint32_t> heads;         // open-addressed: row + 1, or 0
  Buffer<uint32_t> row_of;        // [contributions]
  std::vector<uint32_t> slots;    // [rows]
  std::vector<uint32_t> ends;     // [rows] end of each row's contributions
  Buffer<uint32_t> contributions;  // sorted by row, stable
  std::vector<int64_t> first;     // [sources + 1] number of each source's first contribution
  std::vector<int64_t> ids;       // [rows], if asked for
};

Updater::Updater(StepPlan* plan, const std::vector<Lookup*>& lookups, const int64_t* sources)
    : plan_(plan), sources_(plan->num_tables()) {
  const int W = plan->world_size;
  // Source ranks in order, host by host where a relay sums a host's gradients before they come: then the sum of this
  // host's own ranks must be a sum of its own too, or it would depend on which host the owner is.
  std::vector<int> order_of_ranks(W);
  std::iota(order_of_ranks.begin(), order_of_ranks.end(), 0);
  if (!plan->hosts.empty())
    std::stable_sort(order_of_ranks.begin(), order_of_ranks.end(),
                     [&](int a, int b) { return plan->hosts[a] < plan->hosts[b]; });
  for (size_t l = 0; l < lookups.size(); ++l) {
    Lookup& lookup = *lookups[l];
    if (!lookup.has_grads_) throw std::invalid_argument("apply needs segment_sum of every lookup first");
    for (int p : order_of_ranks) {
      const int group = static_cast<int>(l) * W + (plan->hosts.empty() ? p : plan->hosts[p]);
      const std::byte* sums = p == plan->rank ? nullptr : reinterpret_cast<const std::byte*>(sources[l * W + p]);
      const uint32_t* order = p == plan->rank ? lookup.order_.data() + lookup.order_start_[p] : nullptr;
      if (plan->has_pooled_flow) {
        const std::byte* grads = lookup.own_grads_.data();
        if (sums) {
          grads = sums;
          for (int64_t r = lookup.incoming_.peer_start[p]; r < lookup.incoming_.peer_start[p + 1]; ++r)
            grads += lookup.incoming_.runs[r].count * plan->tables[lookup.incoming_.runs[r].table].wire_grad_bytes;
        }
        lookup.scatter_bag_grads(p, grads);
      }
      for (int64_t r = lookup.incoming_.peer_start[p]; r < lookup.incoming_.peer_start[p + 1]; ++r) {
        const Run& run = lookup.incoming_.runs[r];
        const bool is_pooled = plan->tables[run.table].is_pooled;
        // Gradients of bags come straight: nothing has summed them per host.
        sources_[run.table].push_back(
            {&lookup, lookup.incoming_slots_.data() + run.start, run.count, is_pooled ? nullptr : order, sums,
             is_pooled ? static_cast<int>(l) * W + p : group,
             lookup.incoming_run_ids_[r], is_pooled ? lookup.run_sums_[r].data() : nullptr});
        if (p == plan->rank)
          order += run.count;
        else
          sums += run.count * plan->tables[run.table].wire_grad_bytes;
      }
    }
  }
  if (plan->hosts.empty() || !plan->has_pooled_flow) return;
  for (int t = 0; t < plan->num_tables(); ++t)
    if (plan->tables[t].is_pooled)
      std::stable_sort(sources_[t].begin(), sources_[t].end(),
                       [](const GradSource& a, const GradSource& b) { return a.group < b.group; });
}

void Updater::apply(uint32_t step, const float* lrs) {
  plan_->store->begin_step(step);
  for (int t = 0; t < plan_->num_tables(); ++t) {
    if (sources_[t].empty() || plan_->tables[t].shares_statistic) continue;
    const StepScalars scalars = make_scalars(plan_->store->table(t), step, lrs[t]);
    if (sources_[t].size() == 1)
      update_single(t, sources_[t][0], scalars);
    else
      update_merged(t, sources_[t], scalars);
    if (plan_->tables[t].is_mirrored)
      for (const GradSource& source : sources_[t]) plan_->mirrors->touch(t, source.slots, source.count);
  }
  if (plan_->mirrors) plan_->mirrors->settle();
}

const float* Updater::gradient(int t, const GradSource& source, int64_t i, float* space) const {
  const Table& table = plan_->tables[t];
  if (source.summed) return source.summed + i * table.dim;
  if (source.order) {
    const float* sum = source.lookup->sum_row(t, source.order[i], space);
    if (!table.rounds_grads()) return sum;
    if (sum != space) std::memcpy(space, sum, table.dim * sizeof(float));
    round_trip(table.grads_codec, table.dim, space);
    return space;
  }
  const std::byte* wire = source.sums + i * table.wire_grad_bytes;
  if (!table.rounds_grads()) return reinterpret_cast<const float*>(wire);
  decode_wire(table.grads_codec, wire, table.dim, space);
  return space;
}

void Updater::update_single(int t, const GradSource& source, const StepScalars& scalars) {
  const int dim = plan_->tables[t].dim;
  plan_->threads->run((source.count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int thread) {
    const int64_t begin = task * kRowsPerTask, end = std::min(source.count, begin + kRowsPerTask);
    alignas(32) float space[kDimMax];
    with_updater(*plan_->store, t, scalars, thread, [&](auto&& updater) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < source.count) {
          updater.prefetch(source.slots[i + kAhead]);
          if (source.order) source.lookup->prefetch_row_grad(t, source.order[i + kAhead]);
        }
        update_row(updater, dim, source.slots[i], gradient(t, source, i, space));
      }
    });
  });
}

namespace {

// Numbers the distinct rows of `sources` in order of first contribution, and sorts the contributions by row.
Merge& merge_rows(const std::vector<GradSource>& sources, bool with_ids) {
  static thread_local Merge merge;
  int64_t total = 0;
  std::vector<int64_t>& first = merge.first;
  first.resize(sources.size() + 1);
  for (size_t s = 0; s < sources.size(); ++s) {
    first[s] = total;
    total += sources[s].count;
  }
  first[sources.size()] = total;
  uint64_t capacity = 16;
  while (capacity < 2 * static_cast<uint64_t>(total)) capacity <<= 1;
  std::memset(merge.heads.grow(capacity), 0, capacity * sizeof(uint32_t));
  merge.row_of.grow(total);
  merge.contributions.grow(total);
  merge.slots.clear();
  merge.ids.clear();
  merge.ends.clear();
  for (size_t s = 0; s < sources.size(); ++s) {
    for (int64_t i = 0; i < sources[s].count; ++i) {
      const uint32_t slot = sources[s].slots[i];
      uint64_t place = fmix64(slot) & (capacity - 1);
      while (merge.heads[place] && merge.slots[merge.heads[place] - 1] != slot) place = (place + 1) & (capacity - 1);
      if (!merge.heads[place]) {
        merge.slots.push_back(slot);
        if (with_ids) merge.ids.push_back(sources[s].ids[i]);
        merge.ends.push_back(0);
        merge.heads[place] = static_cast<uint32_t>(merge.slots.size());
      }
      const uint32_t row = merge.heads[place] - 1;
      ++merge.ends[row];
      merge.row_of[first[s] + i] = row;
    }
  }
  uint32_t position = 0;
  for (uint32_t& end : merge.ends) {
    const uint32_t count = end;
    end = position;
    position += count;
  }
  for (int64_t c = 0; c < total; ++c) merge.contributions[merge.ends[merge.row_of[c]]++] = static_cast<uint32_t>(c);
  return merge;
}

}  // namespace

template <class Visit>
void Updater::sum_merged(int t, const std::vector<GradSource>& sources, const Merge& rows, Visit&& visit) {
  const int dim = plan_->tables[t].dim;
  const std::vector<int64_t>& first = rows.first;
  const int64_t num_rows = static_cast<int64_t>(rows.slots.size());
  auto source_of = [&](uint32_t contribution) {
    return std::upper_bound(first.begin(), first.end(), int64_t{contribution}) - first.begin() - 1;
  };
  auto gradient_of = [&](uint32_t contribution, float* space) {
    const size_t s = source_of(contribution);
    return gradient(t, sources[s], contribution - first[s], space);
  };
  const bool has_groups = !plan_->hosts.empty();  // Else every source is a group.
  // Adds contributions [c, end) of the group of the first to it, in `sum`; returns the sum, and where the next group is.
  auto sum_group = [&](uint32_t* c, uint32_t end, float* sum, float* space) {
    auto group_of = [&](uint32_t at) { return sources[source_of(rows.contributions[at])].group; };
    const int group = has_groups ? group_of(*c) : 0;
    const uint32_t first_of_group = *c;
    const float* gradient = gradient_of(rows.contributions[(*c)++], sum);
    for (; has_groups && *c < end && group_of(*c) == group; ++*c) {
      if (gradient != sum) std::memcpy(sum, gradient, dim * sizeof(float));
      gradient = sum;
      add_row(sum, gradient_of(rows.contributions[*c], space), dim);
    }
    // A relay encodes what it has summed: so does the sum of this host.
    if (*c - first_of_group > 1 && plan_->tables[t].rounds_grads()) round_trip(plan_->tables[t].grads_codec, dim, sum);
    return gradient;
  };
  plan_->threads->run((num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int thread) {
    const int64_t begin = task * kRowsPerTask, end = std::min(num_rows, begin + kRowsPerTask);
    alignas(32) float sum[kDimMax], group_sum[kDimMax], space[kDimMax];
    visit(thread, begin, end, [&](int64_t row) {
      uint32_t c = row ? rows.ends[row - 1] : 0;
      const uint32_t c_end = rows.ends[row];
      const float* gradient = sum_group(&c, c_end, sum, space);
      while (c < c_end) {
        if (gradient != sum) std::memcpy(sum, gradient, dim * sizeof(float));
        gradient = sum;
        add_row(sum, sum_group(&c, c_end, group_sum, space), dim);
      }
      return gradient;
    });
  });
}

void Updater::update_merged(int t, const std::vector<GradSource>& sources, const StepScalars& scalars) {
  const int dim = plan_->tables[t].dim;
  const Merge& rows = merge_rows(sources, false);
  const int64_t num_rows = static_cast<int64_t>(rows.slots.size());
  sum_merged(t, sources, rows, [&](int thread, int64_t begin, int64_t end, auto&& gradient_of) {
    with_updater(*plan_->store, t, scalars, thread, [&](auto&& updater) {
      for (int64_t row = begin; row < end; ++row) {
        if (row + kAhead < num_rows) updater.prefetch(rows.slots[row + kAhead]);
        update_row(updater, dim, rows.slots[row], gradient_of(row));
      }
    });
  });
}

void Updater::collect(int t, BlockGradients* out) {
  const std::vector<GradSource>& sources = sources_[t];
  const Table& table = plan_->tables[t];
  const int dim = table.dim;
  if (sources.empty()) {
    out->slots.clear();
    out->ids.clear();
    out->block_starts.assign(table.owners.size() + 1, 0);
    return;
  }
  const bool is_single = sources.size() == 1;  // Then its rows are distinct.
  const Merge& rows = merge_rows(is_single ? std::vector<GradSource>{} : sources, true);
  const uint32_t* slots = is_single ? sources[0].slots : rows.slots.data();
  const int64_t* ids = is_single ? sources[0].ids : rows.ids.data();
  const int64_t num_rows = is_single ? sources[0].count : static_cast<int64_t>(rows.slots.size());
  // A stable counting sort by row block.
  std::vector<uint32_t> block_of(num_rows), place(num_rows);
  out->slots.resize(num_rows);
  out->ids.resize(num_rows);
  out->block_starts.assign(table.owners.size() + 1, 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    block_of[row] = row_block(ids[row], table.log2_blocks);
    ++out->block_starts[block_of[row] + 1];
  }
  for (size_t block = 0; block < table.owners.size(); ++block) out->block_starts[block + 1] += out->block_starts[block];
  std::vector<int64_t> cursor(out->block_starts.begin(), out->block_starts.end() - 1);
  for (int64_t row = 0; row < num_rows; ++row) {
    place[row] = static_cast<uint32_t>(cursor[block_of[row]]++);
    out->slots[place[row]] = slots[row];
    out->ids[place[row]] = ids[row];
  }
  float* gradients = out->gradients.grow(num_rows * dim);
  if (!is_single) {
    sum_merged(t, sources, rows, [&](int, int64_t begin, int64_t end, auto&& gradient_of) {
      for (int64_t row = begin; row < end; ++row)
        std::memcpy(gradients + int64_t{place[row]} * dim, gradient_of(row), dim * sizeof(float));
    });
    return;
  }
  const GradSource& source = sources[0];
  plan_->threads->run((num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    const int64_t end = std::min(num_rows, (task + 1) * kRowsPerTask);
    for (int64_t i = task * kRowsPerTask; i < end; ++i) {
      float* sum = gradients + int64_t{place[i]} * dim;
      if (source.order && i + kAhead < num_rows) source.lookup->prefetch_row_grad(t, source.order[i + kAhead]);
      const float* found = gradient(t, source, i, sum);
      if (found != sum) std::memcpy(sum, found, dim * sizeof(float));
    }
  });
}

}  // namespace shoal::step
