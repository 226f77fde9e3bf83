// The owner's side of a lookup: ids -> slots, rows -> messages; and where the requester finds each unique row.
#include <algorithm>
#include <cstring>

#include "core/step/lookup.h"
#include "core/step/mirrors.h"
#include "core/step/simd.h"
#include "core/step/wire.h"

namespace shoal::step {
namespace {

constexpr int64_t kRowsPerTask = 512;
constexpr int64_t kAhead = 10;

alignas(64) const float kZeroRow[kDimMax] = {};

// Copies or decodes a row to float32.
inline void read_row(const Table& table, const std::byte* weights, float* out) {
  if (table.type == RowType::F32)
    std::memcpy(out, weights, table.dim * sizeof(float));
  else
    decode_row(table.type, weights, static_cast<uint32_t>(table.dim), out);
}

}  // namespace

// The runs that this rank asks of a peer, of all tables or of those in one flow.
std::vector<Run> Lookup::runs_to(int peer, Part part) const {
  std::vector<Run> runs;
  for (int64_t r = outgoing_.peer_start[peer]; r < outgoing_.peer_start[peer + 1]; ++r) {
    const Run& run = outgoing_.runs[r];
    if (part == Part::kAll || plan_->tables[run.table].is_pooled == (part == Part::kPooled)) runs.push_back(run);
  }
  return runs;
}

void Lookup::id_bytes(int64_t* bytes) const {
  for (int p = 0; p < plan_->world_size; ++p) {
    bytes[p] = 0;
    if (p == plan_->rank) continue;
    const bool is_far = plan_->is_far(p);
    const std::vector<Run> runs = runs_to(p, is_far ? Part::kRows : Part::kAll);
    bytes[p] = ids_section_bytes(*plan_, runs.data(), runs.data() + runs.size());
    if (plan_->has_pooled_flow && !is_far) bytes[p] += 4 * bag_words_[p];
  }
}

void Lookup::straight_id_bytes(int64_t* bytes) const {
  for (int p = 0; p < plan_->world_size; ++p) {
    bytes[p] = 0;
    if (!plan_->has_pooled_flow || !plan_->is_far(p)) continue;
    const std::vector<Run> runs = runs_to(p, Part::kPooled);
    bytes[p] = ids_section_bytes(*plan_, runs.data(), runs.data() + runs.size()) + 4 * bag_words_[p];
  }
}

// Writes the counts and ids of runs, and moves `out` behind them.
void Lookup::write_runs(const std::vector<Run>& runs, std::byte** out) const {
  write_ids_header(*plan_, runs.data(), runs.data() + runs.size(), *out);
  std::byte* at = *out + ids_header_bytes(*plan_, static_cast<int64_t>(runs.size()));
  for (const Run& run : runs) {
    const Table& table = plan_->tables[run.table];
    const uint32_t* order = order_.data() + run.start;
    if (table.is_wide) {
      for (int64_t i = 0; i < run.count; ++i) std::memcpy(at + 8 * i, &unique_ids_[order[i]], 8);
    } else {
      for (int64_t i = 0; i < run.count; ++i) {
        const int32_t id = static_cast<int32_t>(unique_ids_[order[i]]);
        std::memcpy(at + 4 * i, &id, 4);
      }
      if (run.count % 2) std::memset(at + 4 * run.count, 0, 4);
    }
    at += ids_bytes(table, run.count);
  }
  *out = at;
}

void Lookup::write_ids(const int64_t* destinations) const {
  for (int p = 0; p < plan_->world_size; ++p) {
    if (p == plan_->rank || !destinations[p]) continue;
    const bool is_far = plan_->is_far(p);
    const std::vector<Run> runs = runs_to(p, is_far ? Part::kRows : Part::kAll);
    if (runs.empty()) continue;
    std::byte* out = reinterpret_cast<std::byte*>(destinations[p]);
    write_runs(runs, &out);
    if (plan_->has_pooled_flow && !is_far) write_bags(p, reinterpret_cast<uint32_t*>(out));
  }
}

void Lookup::write_straight_ids(const int64_t* destinations) const {
  for (int p = 0; p < plan_->world_size; ++p) {
    if (!plan_->has_pooled_flow || !plan_->is_far(p)) continue;
    const std::vector<Run> runs = runs_to(p, Part::kPooled);
    if (runs.empty()) continue;
    std::byte* out = reinterpret_cast<std::byte*>(destinations[p]);
    write_runs(runs, &out);
    write_bags(p, reinterpret_cast<uint32_t*>(out));
  }
}

// Owner: reads the counts of a section, which must be about tables of `part`; returns the number of ids.
int64_t Lookup::read_runs(int peer, Part part, const std::byte* section, int64_t bytes, int64_t first_row,
                          int64_t* end) {
  const size_t first_run = incoming_.runs.size();
  const int64_t count =
      read_ids_header(*plan_, peer, section, bytes, first_row, &incoming_.runs, &incoming_data_, end);
  for (size_t r = first_run; r < incoming_.runs.size(); ++r) {
    const Run& run = incoming_.runs[r];
    const Table& table = plan_->tables[run.table];
    if (part != Part::kAll && table.is_pooled != (part == Part::kPooled))
      throw ProtocolViolation("the ids section from rank " + std::to_string(peer) + " holds table " +
                              std::to_string(run.table) + ", whose ids take another way");
    incoming_.row_bytes[peer] += run.count * table.wire_row_bytes;
    incoming_.grad_bytes[peer] += run.count * table.wire_grad_bytes;
  }
  return count;
}

void Lookup::resolve(const int64_t* sources, const int64_t* source_bytes, const int64_t* straight,
                     const int64_t* straight_bytes) {
  const int W = plan_->world_size;
  incoming_.runs.clear();
  incoming_data_.clear();
  int64_t total = 0;
  // What follows the ids: which bags they are in.
  std::vector<const std::byte*> bags(W, nullptr);
  std::vector<int64_t> bag_bytes(W, 0);
  for (int p = 0; p < W; ++p) {
    incoming_.peer_start[p] = static_cast<int64_t>(incoming_.runs.size());
    incoming_.row_bytes[p] = incoming_.grad_bytes[p] = 0;
    if (p == plan_->rank) {
      for (int64_t r = outgoing_.peer_start[p]; r < outgoing_.peer_start[p + 1]; ++r) {
        incoming_.runs.push_back({outgoing_.runs[r].table, total, outgoing_.runs[r].count});
        incoming_data_.push_back(nullptr);
        total += outgoing_.runs[r].count;
      }
    } else {
      const bool is_far = plan_->is_far(p);
      const std::byte* section = reinterpret_cast<const std::byte*>(sources[p]);
      int64_t bytes = source_bytes[p], end = 0;
      const bool has_bags = plan_->has_pooled_flow && !is_far;
      total += read_runs(p, is_far ? Part::kRows : Part::kAll, section, bytes, total, has_bags ? &end : nullptr);
      if (plan_->has_pooled_flow && is_far) {
        section = straight ? reinterpret_cast<const std::byte*>(straight[p]) : nullptr;
        bytes = straight ? straight_bytes[p] : 0;
        total += read_runs(p, Part::kPooled, section, bytes, total, &end);
      }
      bags[p] = section + end;
      bag_bytes[p] = bytes - end;
    }
  }
  incoming_.peer_start[W] = static_cast<int64_t>(incoming_.runs.size());
  incoming_ids_.grow(total);
  incoming_slots_.grow(total);
  incoming_run_ids_.resize(incoming_.runs.size());
  for (int p = 0; p < W; ++p) {
    for (int64_t r = incoming_.peer_start[p]; r < incoming_.peer_start[p + 1]; ++r) {
      const Run& run = incoming_.runs[r];
      int64_t* ids = incoming_ids_.data() + run.start;
      incoming_run_ids_[r] = ids;
      if (p != plan_->rank) {
        read_ids(*plan_, p, plan_->rank, run.table, incoming_data_[r], run.count, ids);
        continue;
      }
      const uint32_t* order = order_.data() + order_start_[p] + (run.start - incoming_.runs[incoming_.peer_start[p]].start);
      if (plan_->tables[run.table].has_one_owner) {
        incoming_run_ids_[r] = reinterpret_cast<const int64_t*>(unique_ids_.data() + order[0]);
      } else {
        for (int64_t i = 0; i < run.count; ++i) ids[i] = static_cast<int64_t>(unique_ids_[order[i]]);
      }
    }
  }
  if (plan_->has_pooled_flow) {
    bag_sections_.resize(W);
    bag_parts_.assign(W, {});
    run_sums_.resize(incoming_.runs.size());
    for (int p = 0; p < W; ++p) {
      if (p != plan_->rank) {
        read_bags(p, bags[p], bag_bytes[p]);
        continue;
      }
      std::vector<uint32_t> own(bag_words_[p]);
      write_bags(p, own.data());
      read_bags(p, reinterpret_cast<const std::byte*>(own.data()), 4 * bag_words_[p]);
    }
  }
  // Only after every section is known to be sound are rows reserved.
  find_slots();
  point_at_local_rows();
  round_local_rows();
}

// Tables may be resolved side by side; the runs of one table one after the other.
void Lookup::find_slots() {
  const int T = plan_->num_tables();
  table_runs_.assign(T + 1, 0);
  for (const Run& run : incoming_.runs) ++table_runs_[run.table + 1];
  for (int t = 0; t < T; ++t) table_runs_[t + 1] += table_runs_[t];
  std::vector<int64_t> by_table(incoming_.runs.size()), cursor(table_runs_.begin(), table_runs_.end() - 1);
  for (size_t r = 0; r < incoming_.runs.size(); ++r) by_table[cursor[incoming_.runs[r].table]++] = static_cast<int64_t>(r);
  plan_->threads->run(T, [&](int64_t t, int) {
    for (int64_t i = table_runs_[t]; i < table_runs_[t + 1]; ++i) {
      const Run& run = incoming_.runs[by_table[i]];
      const int64_t bad = plan_->store->resolve(static_cast<uint32_t>(t), incoming_run_ids_[by_table[i]], run.count,
                                                incoming_slots_.data() + run.start, is_training_);
      if (bad >= 0)
        throw std::logic_error("the placement gives this rank a row block of table " + plan_->store->table(t).name +
                               " that its store does not own");
    }
  });
}

void Lookup::point_at_local_rows() {
  const int rank = plan_->rank;
  row_address_.grow(num_positions_ + 1);
  row_address_[num_positions_] = reinterpret_cast<uintptr_t>(kZeroRow);
  int64_t missing_floats = 0;
  auto local_runs = [&](auto&& fn) {
    const uint32_t* order = order_.data() + order_start_[rank];
    for (int64_t r = incoming_.peer_start[rank]; r < incoming_.peer_start[rank + 1]; ++r) {
      const Run& run = incoming_.runs[r];
      fn(run, plan_->tables[run.table], order, incoming_run_ids_[r]);
      order += run.count;
    }
  };
  local_runs([&](const Run& run, const Table& table, const uint32_t* order, const int64_t*) {
    if (table.is_mirrored) return;
    const Arena& arena = plan_->store->arena_of(run.table);
    const uint32_t* slots = incoming_slots_.data() + run.start;
    const uintptr_t tag = table.type == RowType::F32 ? 0 : kEncodedTag;
    for (int64_t i = 0; i < run.count; ++i) {
      if (slots[i] == kNoSlot)
        missing_floats += table.dim;
      else
        row_address_[order[i]] = reinterpret_cast<uintptr_t>(arena.weights(slots[i])) | tag;
    }
  });
  if (missing_floats == 0) return;
  // Evaluation of ids that were never trained: their initial values, computed aside.
  float* space = initial_rows_.grow(missing_floats);
  local_runs([&](const Run& run, const Table& table, const uint32_t* order, const int64_t* ids) {
    if (table.is_mirrored) return;
    for (int64_t i = 0; i < run.count; ++i) {
      if (incoming_slots_[run.start + i] != kNoSlot) continue;
      initial_row(plan_->store->table(run.table), ids[i], space);
      row_address_[order[i]] = reinterpret_cast<uintptr_t>(space);
      space += table.dim;
    }
  });
}

void Lookup::round_local_rows() {
  const Run* begin = outgoing_.runs.data() + outgoing_.peer_start[plan_->rank];
  const Run* end = outgoing_.runs.data() + outgoing_.peer_start[plan_->rank + 1];
  int64_t floats = 0;
  for (const Run* run = begin; run != end; ++run)
    if (plan_->tables[run->table].rounds_values()) floats += run->count * plan_->tables[run->table].dim;
  if (floats == 0) return;
  float* rounded = rounded_rows_.grow(floats);
  for (const Run* run = begin; run != end; ++run) {
    const Table& table = plan_->tables[run->table];
    if (!table.rounds_values() || table.is_mirrored) continue;
    const uint32_t* order = order_.data() + run->start;
    plan_->threads->run((run->count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
      alignas(32) float space[kDimMax];
      alignas(32) std::byte wire[4 * kDimMax];
      const int64_t last = std::min(run->count, (task + 1) * kRowsPerTask);
      for (int64_t i = task * kRowsPerTask; i < last; ++i) {
        uintptr_t& address = row_address_[order[i]];
        const float* row = reinterpret_cast<const float*>(address & ~kEncodedTag);
        if (address & kEncodedTag) {
          decode_row(table.type, reinterpret_cast<const std::byte*>(row), static_cast<uint32_t>(table.dim), space);
          row = space;
        }
        float* out = rounded + i * table.dim;
        encode_wire(table.values_codec, row, table.dim, wire);
        decode_wire(table.values_codec, wire, table.dim, out);
        address = reinterpret_cast<uintptr_t>(out);
      }
    });
    rounded += run->count * table.dim;
  }
}

void Lookup::point_at_mirrored_rows() {
  for (int t = 0; t < plan_->num_tables(); ++t) {
    if (!plan_->tables[t].is_mirrored) continue;
    for (int64_t u = position_start_[t]; u < position_start_[t] + num_unique_[t]; ++u)
      row_address_[u] = reinterpret_cast<uintptr_t>(plan_->mirrors->row(t, unique_ids_[u]));
  }
}

void Lookup::point_at_remote_rows(const int64_t* sources) {
  point_at_mirrored_rows();
  // Rows that are decoded here, and those that weight_grad needs when the message's memory has been used again.
  auto is_copied = [&](const Table& table) {
    return !table.is_pooled && (table.values_codec != Codec::kFp32 || (is_training_ && table.has_weighted_features));
  };
  int64_t floats = 0;
  for (int p = 0; p < plan_->world_size; ++p)
    for (int64_t r = outgoing_.peer_start[p]; r < outgoing_.peer_start[p + 1]; ++r) {
      const Table& table = plan_->tables[outgoing_.runs[r].table];
      if (p != plan_->rank && is_copied(table)) floats += outgoing_.runs[r].count * table.dim;
    }
  float* kept = kept_rows_.grow(floats);
  for (int p = 0; p < plan_->world_size; ++p) {
    if (p == plan_->rank) continue;
    const std::byte* rows = reinterpret_cast<const std::byte*>(sources[p]);
    for (int64_t r = outgoing_.peer_start[p]; r < outgoing_.peer_start[p + 1]; ++r) {
      const Run& run = outgoing_.runs[r];
      const Table& table = plan_->tables[run.table];
      if (table.is_mirrored || table.is_pooled) continue;
      const std::byte* first = rows;
      int64_t row_bytes = table.wire_row_bytes;
      if (is_copied(table)) {
        plan_->threads->run((run.count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
          const int64_t end = std::min(run.count, (task + 1) * kRowsPerTask);
          for (int64_t i = task * kRowsPerTask; i < end; ++i)
            decode_wire(table.values_codec, rows + i * row_bytes, table.dim, kept + i * table.dim);
        });
        first = reinterpret_cast<const std::byte*>(kept);
        row_bytes = table.dim * int64_t{4};
        kept += run.count * table.dim;
      }
      for (int64_t i = 0; i < run.count; ++i)
        row_address_[order_[run.start + i]] = reinterpret_cast<uintptr_t>(first + i * row_bytes);
      rows += run.count * table.wire_row_bytes;
    }
  }
}

void Lookup::write_rows(const int64_t* destinations) const {
  for (int p = 0; p < plan_->world_size; ++p) {
    if (p == plan_->rank || incoming_.row_bytes[p] == 0 || !destinations[p]) continue;
    std::byte* out = reinterpret_cast<std::byte*>(destinations[p]);
    for (int64_t r = incoming_.peer_start[p]; r < incoming_.peer_start[p + 1]; ++r) {
      const Run& run = incoming_.runs[r];
      const Table& table = plan_->tables[run.table];
      if (table.is_mirrored || table.is_pooled) continue;
      const bool is_plain = table.values_codec == Codec::kFp32;
      const Arena& arena = plan_->store->arena_of(run.table);
      const uint32_t* slots = incoming_slots_.data() + run.start;
      plan_->threads->run((run.count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
        alignas(32) float space[kDimMax];
        const int64_t end = std::min(run.count, (task + 1) * kRowsPerTask);
        for (int64_t i = task * kRowsPerTask; i < end; ++i) {
          if (i + kAhead < end && slots[i + kAhead] != kNoSlot) arena.prefetch(slots[i + kAhead]);
          std::byte* wire = out + i * table.wire_row_bytes;
          float* row = is_plain ? reinterpret_cast<float*>(wire) : space;
          if (slots[i] == kNoSlot)
            initial_row(plan_->store->table(run.table), incoming_ids_[run.start + i], row);
          else
            read_row(table, arena.weights(slots[i]), row);
          if (!is_plain) encode_wire(table.values_codec, row, table.dim, wire);
        }
      });
      out += run.count * table.wire_row_bytes;
    }
    if (plan_->has_pooled_flow) write_partial_sums(p, out);
  }
}

// Bytes of the rows that rank `peer` sends, which partial sums follow.
int64_t Lookup::rows_bytes_in(int peer) const {
  int64_t bytes = 0;
  for (int64_t r = outgoing_.peer_start[peer]; r < outgoing_.peer_start[peer + 1]; ++r)
    bytes += outgoing_.runs[r].count * plan_->tables[outgoing_.runs[r].table].wire_row_bytes;
  return bytes;
}

void Lookup::table_loads(int64_t* unique_asked, int64_t* rows_served) const {
  std::copy(num_unique_.begin(), num_unique_.end(), unique_asked);
  std::fill(rows_served, rows_served + plan_->num_tables(), 0);
  for (const Run& run : incoming_.runs) rows_served[run.table] += run.count;
}

int64_t Lookup::nbytes() const {
  return bag_offsets_.nbytes() + inverse_.nbytes() + unique_ids_.nbytes() + unique_owner_.nbytes() +
         unique_count_.nbytes() + row_address_.nbytes() + order_.nbytes() + incoming_ids_.nbytes() +
         incoming_slots_.nbytes() + initial_rows_.nbytes() + kept_rows_.nbytes() +
         rounded_rows_.nbytes() + ends_.nbytes() + entries_.nbytes() +
         scales_.nbytes() + hot_sums_.nbytes();
}

}  // namespace shoal::step
