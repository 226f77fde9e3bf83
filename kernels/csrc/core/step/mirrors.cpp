#include "core/step/mirrors.h"

#include <algorithm>
#include <cstring>

#include "core/step/wire.h"

namespace shoal::step {
namespace {

constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) & ~(kAlignment - 1); }

std::vector<Run> runs_of(const std::vector<std::vector<uint64_t>>& touched) {
  std::vector<Run> runs;
  for (size_t t = 0; t < touched.size(); ++t)
    if (!touched[t].empty()) runs.push_back({static_cast<int>(t), 0, static_cast<int64_t>(touched[t].size())});
  return runs;
}

}  // namespace

Mirrors::Mirrors(StepPlan* plan) : plan_(plan), values_(plan->tables.size()), touched_(plan->tables.size()) {
  for (int t = 0; t < plan->num_tables(); ++t) {
    const Table& table = plan->tables[t];
    if (!table.is_mirrored) continue;
    float* values = values_[t].grow(table.num_embeddings * table.dim);
    const TableDesc& desc = plan->store->table(t);
    for (uint64_t id = 0; id < table.num_embeddings; ++id)
      initial_row(desc, static_cast<int64_t>(id), values + id * table.dim);
  }
}

void Mirrors::touch_all() {
  std::vector<int64_t> ids;
  std::vector<uint32_t> slots;
  for (int t = 0; t < plan_->num_tables(); ++t) {
    const Table& table = plan_->tables[t];
    if (!table.is_mirrored) continue;
    ids.clear();
    for (uint64_t id = 0; id < table.num_embeddings; ++id)
      if (table.owner_of(fmix64(id)) == plan_->rank) ids.push_back(static_cast<int64_t>(id));
    slots.resize(ids.size());
    plan_->store->resolve(t, ids.data(), static_cast<int64_t>(ids.size()), slots.data(), false);
    for (size_t i = 0; i < ids.size(); ++i)
      if (slots[i] != kNoSlot) touched_[t].push_back(static_cast<uint64_t>(ids[i]));
  }
  settle();
}

void Mirrors::touch(int t, const uint32_t* slots, int64_t count) {
  const Arena& arena = plan_->store->arena_of(t);
  for (int64_t i = 0; i < count; ++i) {
    int64_t id;
    std::memcpy(&id, arena.record(slots[i]) + offsetof(RowHeader, id), sizeof id);
    touched_[t].push_back(static_cast<uint64_t>(id));
  }
}

void Mirrors::settle() {
  for (int t = 0; t < plan_->num_tables(); ++t) {
    std::vector<uint64_t>& ids = touched_[t];
    if (ids.empty()) continue;
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    const int64_t dim = plan_->tables[t].dim;
    for (uint64_t id : ids) {
      const int64_t signed_id = static_cast<int64_t>(id);
      plan_->store->lookup(t, &signed_id, 1, values_[t].data() + id * dim);
    }
  }
}

int64_t Mirrors::bytes() const {
  const std::vector<Run> runs = runs_of(touched_);
  if (runs.empty()) return 0;
  int64_t rows = 0;
  for (const Run& run : runs) rows += run.count * plan_->tables[run.table].dim * int64_t{4};
  return kAlignment + aligned(ids_section_bytes(*plan_, runs.data(), runs.data() + runs.size())) + rows;
}

void Mirrors::write(std::byte* out) const {
  const std::vector<Run> runs = runs_of(touched_);
  if (runs.empty()) return;
  const Run* begin = runs.data();
  const Run* end = begin + runs.size();
  const int64_t section = ids_section_bytes(*plan_, begin, end);
  std::memset(out, 0, kAlignment);
  std::memcpy(out, &section, sizeof section);
  std::byte* ids = out + kAlignment;
  write_ids_header(*plan_, begin, end, ids);
  ids += ids_header_bytes(*plan_, runs.size());
  float* rows = reinterpret_cast<float*>(out + kAlignment + aligned(section));
  for (const Run& run : runs) {
    const Table& table = plan_->tables[run.table];
    write_table_ids(table, touched_[run.table].data(), run.count, ids);
    ids += ids_bytes(table, run.count);
    for (uint64_t id : touched_[run.table]) {
      std::memcpy(rows, row(run.table, id), table.dim * sizeof(float));
      rows += table.dim;
    }
  }
}

void Mirrors::clear() {
  for (auto& ids : touched_) ids.clear();
}

void Mirrors::read(int peer, const std::byte* section, int64_t bytes) {
  if (bytes == 0) return;
  const auto violation = [&](const char* what) {
    throw ProtocolViolation("the changed rows from rank " + std::to_string(peer) + " " + what);
  };
  if (bytes < kAlignment) violation("are cut short");
  int64_t ids_bytes_claimed;
  std::memcpy(&ids_bytes_claimed, section, sizeof ids_bytes_claimed);
  if (ids_bytes_claimed < 0 || aligned(ids_bytes_claimed) > bytes - kAlignment) violation("claim more ids than there are");
  std::vector<Run> runs;
  std::vector<const std::byte*> data;
  read_ids_header(*plan_, peer, section + kAlignment, ids_bytes_claimed, 0, &runs, &data);
  int64_t rows_bytes = 0, total = 0;
  for (const Run& run : runs) {
    if (!plan_->tables[run.table].is_mirrored) violation("name a table that is not mirrored");
    rows_bytes += run.count * plan_->tables[run.table].dim * int64_t{4};
    total += run.count;
  }
  if (kAlignment + aligned(ids_bytes_claimed) + rows_bytes != bytes) violation("do not add up to their bytes");
  std::vector<int64_t> ids(total);
  for (size_t r = 0; r < runs.size(); ++r)
    read_ids(*plan_, peer, peer, runs[r].table, data[r], runs[r].count, ids.data() + runs[r].start);
  const float* rows = reinterpret_cast<const float*>(section + kAlignment + aligned(ids_bytes_claimed));
  for (const Run& run : runs) {
    const int64_t dim = plan_->tables[run.table].dim;
    for (int64_t i = 0; i < run.count; ++i, rows += dim)
      std::memcpy(values_[run.table].data() + ids[run.start + i] * dim, rows, dim * sizeof(float));
  }
}

}  // namespace shoal::step
