#include "core/step/wire.h"

#include <cstring>

namespace shoal::step {
namespace {

uint32_t read_u32(const std::byte* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

void write_u32(std::byte* p, uint32_t value) { std::memcpy(p, &value, sizeof value); }

bool is_dense(const StepPlan& plan, int64_t num_runs) { return 2 * num_runs >= plan.num_tables(); }

[[noreturn]] void violation(int peer, const std::string& what) {
  throw ProtocolViolation("the ids section from rank " + std::to_string(peer) + " " + what);
}

}  // namespace

int64_t ids_header_bytes(const StepPlan& plan, int64_t num_runs) {
  const int64_t words = is_dense(plan, num_runs) ? 1 + plan.num_tables() : 1 + 2 * num_runs;
  return (4 * words + 7) & ~int64_t{7};
}

int64_t ids_section_bytes(const StepPlan& plan, const Run* begin, const Run* end) {
  if (begin == end) return 0;
  int64_t bytes = ids_header_bytes(plan, end - begin);
  for (const Run* run = begin; run != end; ++run) bytes += ids_bytes(plan.tables[run->table], run->count);
  return bytes;
}

void write_ids_header(const StepPlan& plan, const Run* begin, const Run* end, std::byte* out) {
  const int64_t num_runs = end - begin;
  std::memset(out, 0, ids_header_bytes(plan, num_runs));
  if (is_dense(plan, num_runs)) {
    write_u32(out, kDense);
    for (const Run* run = begin; run != end; ++run) write_u32(out + 4 + 4 * run->table, static_cast<uint32_t>(run->count));
    return;
  }
  write_u32(out, static_cast<uint32_t>(num_runs));
  for (const Run* run = begin; run != end; ++run) {
    out += 4;
    write_u32(out, static_cast<uint32_t>(run->table));
    out += 4;
    write_u32(out, static_cast<uint32_t>(run->count));
  }
}

void write_table_ids(const Table& table, const uint64_t* ids, int64_t count, std::byte* out) {
  if (table.is_wide) {
    std::memcpy(out, ids, count * sizeof(uint64_t));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = static_cast<int32_t>(ids[i]);
    std::memcpy(out + 4 * i, &id, 4);
  }
  if (count % 2) std::memset(out + 4 * count, 0, 4);
}

int64_t read_ids_header(const StepPlan& plan, int peer, const std::byte* section, int64_t bytes, int64_t first_row,
                        std::vector<Run>* runs, std::vector<const std::byte*>* data, int64_t* end) {
  if (end) *end = 0;
  if (bytes == 0) return 0;
  if (bytes < 8) violation(peer, "is cut short (" + std::to_string(bytes) + " bytes)");
  const uint32_t num_pairs = read_u32(section);
  const bool dense = num_pairs == kDense;
  const int64_t words = dense ? 1 + int64_t{plan.num_tables()} : 1 + 2 * int64_t{num_pairs};
  int64_t offset = (4 * words + 7) & ~int64_t{7};
  if (offset > bytes) violation(peer, "claims counts beyond its " + std::to_string(bytes) + " bytes");
  const int64_t num_entries = dense ? plan.num_tables() : num_pairs;
  int64_t previous = -1, total = 0;
  for (int64_t i = 0; i < num_entries; ++i) {
    const int64_t table = dense ? i : read_u32(section + 4 + 8 * i);
    const int64_t count = dense ? read_u32(section + 4 + 4 * i) : read_u32(section + 8 + 8 * i);
    if (table <= previous || table >= plan.num_tables()) violation(peer, "names table " + std::to_string(table));
    previous = table;
    if (count == 0) {
      if (!dense) violation(peer, "lists table " + std::to_string(table) + " without ids");
      continue;
    }
    const int64_t run_bytes = ids_bytes(plan.tables[table], count);
    if (run_bytes > bytes - offset)
      violation(peer, "claims " + std::to_string(count) + " ids of table " + std::to_string(table) + " beyond its " +
                          std::to_string(bytes) + " bytes");
    runs->push_back({static_cast<int>(table), first_row + total, count});
    data->push_back(section + offset);
    offset += run_bytes;
    total += count;
  }
  if (end) *end = offset;
  if (!end && offset != bytes)
    violation(peer, "has " + std::to_string(bytes) + " bytes where its counts need " + std::to_string(offset));
  return total;
}

void read_ids(const StepPlan& plan, int peer, int owner, int table_index, const std::byte* data, int64_t count,
              int64_t* ids) {
  const Table& table = plan.tables[table_index];
  if (table.is_wide) {
    std::memcpy(ids, data, count * sizeof(int64_t));
  } else {
    for (int64_t i = 0; i < count; ++i) {
      int32_t id;
      std::memcpy(&id, data + 4 * i, sizeof id);
      ids[i] = id;
    }
  }
  const uint64_t last_id = table.last_id();
  if (table.has_one_owner && table.owners[0] != owner)
    violation(peer, "asks for table " + std::to_string(table_index) + ", which rank " + std::to_string(owner) +
                        " does not own");
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t id = static_cast<uint64_t>(ids[i]);
    if (__builtin_expect(id > last_id, 0))
      violation(peer, "holds id " + std::to_string(ids[i]) + ", outside table " + std::to_string(table_index));
    if (!table.has_one_owner && __builtin_expect(table.owner_of(fmix64(id)) != owner, 0))
      violation(peer, "holds id " + std::to_string(ids[i]) + " of table " + std::to_string(table_index) +
                          ", whose block rank " + std::to_string(owner) + " does not own");
  }
}

}  // namespace shoal::step
