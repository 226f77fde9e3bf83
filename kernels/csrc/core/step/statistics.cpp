#include "core/step/statistics.h"

#include <algorithm>
#include <cstring>

namespace shoal::step {
namespace {

constexpr int64_t kRowsPerTask = 1024;
constexpr int64_t kAhead = 8;

uint64_t fold(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0xFF51AFD7ED558CCDull;
  return hash ^ hash >> 32;
}

}  // namespace

SharedStatistics::SharedStatistics(StepPlan* plan)
    : plan_(plan), out_(plan->world_size), in_(plan->world_size), rows_(plan->num_tables()), squares_(plan->num_tables()) {
  for (int t = 0; t < plan->num_tables(); ++t) {
    const Table& table = plan->tables[t];
    if (!table.shares_statistic) continue;
    if (table.leader < 0) groups_.emplace_back();
    groups_.back().push_back(t);
    squares_[t].resize(table.owners.size());
    rows_[t].block_hashes.resize(table.owners.size());
  }
  for (const std::vector<int>& group : groups_) {
    const size_t num_blocks = plan->tables[group[0]].owners.size();
    for (uint32_t block = 0; block < num_blocks; ++block) {
      auto owner = [&](int t) { return int{plan->tables[t].owners[block]}; };
      // Each rank's first column block of this row block: messages are sized by its rows.
      for (int t : group) {
        const auto mine = std::find_if(group.begin(), group.end(), [&](int k) { return owner(k) == plan->rank; });
        if (mine == group.end()) break;
        if (owner(t) != plan->rank) {
          in_[owner(t)].push_back({t, block, *mine});
          continue;
        }
        std::vector<int> told;
        for (int k : group) {
          if (owner(k) == plan->rank || std::count(told.begin(), told.end(), owner(k))) continue;
          told.push_back(owner(k));
          out_[owner(k)].push_back({t, block, t});
        }
      }
    }
  }
}

int64_t SharedStatistics::num_rows(const Part& part) const {
  const std::vector<int64_t>& starts = rows_[part.mine].sums.block_starts;
  return starts[part.block + 1] - starts[part.block];
}

int64_t SharedStatistics::message_bytes(const std::vector<Part>& parts) const {
  if (parts.empty()) return 0;
  int64_t bytes = sizeof(uint64_t);
  for (const Part& part : parts) bytes += num_rows(part) * static_cast<int64_t>(sizeof(float));
  return bytes;
}

uint64_t SharedStatistics::message_hash(const std::vector<Part>& parts) const {
  uint64_t hash = 0;
  for (const Part& part : parts) hash = fold(hash, rows_[part.mine].block_hashes[part.block]);
  return hash;
}

void SharedStatistics::collect(Updater* updater, int64_t* bytes_out, int64_t* bytes_in) {
  for (const std::vector<int>& group : groups_) {
    for (int t : group) {
      updater->collect(t, &rows_[t].sums);
      square(t);
    }
  }
  count_bytes(bytes_out, bytes_in);
}

void SharedStatistics::collect(HeldGradients* held, int64_t* bytes_out, int64_t* bytes_in) {
  for (const std::vector<int>& group : groups_) {
    for (int t : group) {
      std::swap(rows_[t].sums, *held->table(t));
      square(t);
    }
  }
  count_bytes(bytes_out, bytes_in);
}

void SharedStatistics::count_bytes(int64_t* bytes_out, int64_t* bytes_in) const {
  for (int p = 0; p < plan_->world_size; ++p) {
    bytes_out[p] = message_bytes(out_[p]);
    bytes_in[p] = message_bytes(in_[p]);
  }
}

// The gradients' decay, their sums of squares, and the hashes of the rows' ids.
void SharedStatistics::square(int t) {
  const TableDesc& desc = plan_->store->table(t);
  const Arena& arena = plan_->store->arena_of(t);
  const StepScalars scalars = make_scalars(desc, 1, 0.f);
  Rows& rows = rows_[t];
  const int64_t n = static_cast<int64_t>(rows.sums.slots.size());
  const int dim = plan_->tables[t].dim;
  rows.squares.resize(n);
  plan_->threads->run((n + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    alignas(32) float weights[kDimMax];
    for (int64_t i = task * kRowsPerTask; i < std::min(n, (task + 1) * kRowsPerTask); ++i) {
      float* gradient = rows.sums.gradients.data() + i * dim;
      if (scalars.decay_mode == WeightDecayMode::L2) {
        decode_row(desc.type, arena.weights(rows.sums.slots[i]), dim, weights);
        for (int d = 0; d < dim; ++d) gradient[d] = gradient[d] + scalars.weight_decay * weights[d];
      }
      rows.squares[i] = sum_squares(gradient, dim);
    }
  });
  for (size_t block = 0; block < rows.block_hashes.size(); ++block) {
    uint64_t hash = 0;
    for (int64_t i = rows.sums.block_starts[block]; i < rows.sums.block_starts[block + 1]; ++i)
      hash = fold(hash, static_cast<uint64_t>(rows.sums.ids[i]));
    rows.block_hashes[block] = hash;
  }
}

void SharedStatistics::write(const int64_t* destinations) const {
  for (int p = 0; p < plan_->world_size; ++p) {
    if (out_[p].empty()) continue;
    std::byte* out = reinterpret_cast<std::byte*>(destinations[p]);
    const uint64_t hash = message_hash(out_[p]);
    std::memcpy(out, &hash, sizeof hash);
    out += sizeof hash;
    for (const Part& part : out_[p]) {
      const Rows& rows = rows_[part.table];
      const int64_t bytes = num_rows(part) * static_cast<int64_t>(sizeof(float));
      std::memcpy(out, rows.squares.data() + rows.sums.block_starts[part.block], bytes);
      out += bytes;
    }
  }
}

void SharedStatistics::read(const int64_t* sources) {
  for (int p = 0; p < plan_->world_size; ++p) {
    if (in_[p].empty()) continue;
    const std::byte* in = reinterpret_cast<const std::byte*>(sources[p]);
    uint64_t hash;
    std::memcpy(&hash, in, sizeof hash);
    if (hash != message_hash(in_[p]))
      throw ProtocolViolation("the sums of squares from rank " + std::to_string(p) +
                              " are about other rows than those this rank was asked for");
    const float* squares = reinterpret_cast<const float*>(in + sizeof hash);
    for (const Part& part : in_[p]) {
      squares_[part.table][part.block] = squares;
      squares += num_rows(part);
    }
  }
  for (const std::vector<int>& group : groups_) {
    for (uint32_t block = 0; block < squares_[group[0]].size(); ++block) {
      int first = -1;
      for (int t : group) {
        if (plan_->tables[t].owners[block] != plan_->rank) continue;
        if (first < 0) first = t;
        const bool is_same = num_rows({t, block, t}) == num_rows({first, block, first}) &&
                             rows_[t].block_hashes[block] == rows_[first].block_hashes[block];
        if (!is_same) throw ProtocolViolation("a rank asks for other rows of one column block than of another");
        squares_[t][block] = rows_[t].squares.data() + rows_[t].sums.block_starts[block];
      }
    }
  }
}

void SharedStatistics::add_up(int t, const std::vector<int>& group) {
  Rows& rows = rows_[t];
  const float width = static_cast<float>(plan_->store->table(t).logical_dim);
  rows.means.resize(rows.squares.size());
  for (size_t block = 0; block < squares_[t].size(); ++block) {
    const int64_t start = rows.sums.block_starts[block], n = rows.sums.block_starts[block + 1] - start;
    if (n == 0) continue;
    float* means = rows.means.data() + start;
    std::memcpy(means, squares_[group[0]][block], n * sizeof(float));
    for (size_t k = 1; k < group.size(); ++k)
      for (int64_t i = 0; i < n; ++i) means[i] = means[i] + squares_[group[k]][block][i];
    for (int64_t i = 0; i < n; ++i) means[i] = means[i] / width;
  }
}

void SharedStatistics::update(int t, uint32_t step, float lr) {
  const Rows& rows = rows_[t];
  const int64_t n = static_cast<int64_t>(rows.sums.slots.size());
  const int dim = plan_->tables[t].dim;
  const StepScalars scalars = make_scalars(plan_->store->table(t), step, lr);
  plan_->threads->run((n + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int thread) {
    const int64_t end = std::min(n, (task + 1) * kRowsPerTask);
    with_updater(*plan_->store, t, scalars, thread, [&](auto&& updater) {
      for (int64_t i = task * kRowsPerTask; i < end; ++i) {
        if (i + kAhead < end) updater.prefetch(rows.sums.slots[i + kAhead]);
        updater.update_shared(rows.sums.slots[i], rows.sums.gradients.data() + i * dim, rows.means[i]);
      }
    });
  });
}

void SharedStatistics::apply(const int64_t* sources, uint32_t step, const float* lrs) {
  read(sources);
  for (const std::vector<int>& group : groups_) {
    for (int t : group) add_up(t, group);
    for (int t : group) update(t, step, lrs[t]);
  }
}

}  // namespace shoal::step
