// Adding rows in bulk: checkpoints and migrated blocks.
#include <stdexcept>

#include "core/store/rowstore.h"

namespace shoal {

namespace {

void check_ids(const TableDesc& table, uint32_t block, const int64_t* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t actual = row_block(ids[i], table.log2_blocks);
    if (actual != block) {
      throw std::invalid_argument("table '" + table.name + "': id " + std::to_string(ids[i]) + " belongs to block " +
                                  std::to_string(actual) + ", not to block " + std::to_string(block));
    }
  }
}

void write_record(const RecordLayout& layout, const RowColumns& rows, int64_t i, std::byte* record) {
  RowHeader* head = header(record);
  head->id = rows.ids[i];
  head->last_step = static_cast<int32_t>(rows.last_step[i]);
  const uint32_t count = rows.count[i] > kCountMask ? kCountMask : static_cast<uint32_t>(rows.count[i]);
  head->state = kExists | count;
  if (layout.slot_width != 0) {
    std::memcpy(slots(record), rows.slots + i * layout.slot_width, size_t{layout.slot_width} * 4);
  }
  const size_t weight_bytes = layout.dim * row_type_bytes(layout.type);
  std::memcpy(record + layout.weights_offset, rows.weights + i * weight_bytes, weight_bytes);
}

}  // namespace

void RowStore::import_rows(uint32_t table, uint32_t block_index, const RowColumns& rows, int64_t n, bool replace) {
  require_boundary("importing rows");
  const TableDesc& desc = tables_.at(table);
  if (!owns(table, block_index)) {
    throw std::invalid_argument("table '" + desc.name + "': block " + std::to_string(block_index) + " is not owned");
  }
  check_ids(desc, block_index, rows.ids, n);
  if (replace) clear_block(table, block_index);
  IdMap* map = states_[table].blocks[block_index].get();
  Arena& arena = arena_of(table);
  map->reserve(map->size() + static_cast<uint64_t>(n));
  std::vector<uint32_t> fresh(static_cast<size_t>(n));
  arena.allocate(fresh.size(), fresh.data());
  constexpr int64_t kAhead = 16;
  size_t used = 0;
  int64_t created = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      __builtin_prefetch(map->bucket(fmix64(static_cast<uint64_t>(rows.ids[i + kAhead]))), 1, 3);
    }
    const uint64_t hash = fmix64(static_cast<uint64_t>(rows.ids[i]));
    uint32_t slot = map->find(rows.ids[i], hash);
    const bool is_new = slot == kNoSlot;
    if (is_new) slot = fresh[used++];
    std::byte* record = arena.record(slot);
    RowHeader* head = header(record);
    if (is_new) head->state = 0;
    created += (head->state & kExists) == 0;
    if (head->stamp < guard_) save(table, slot, record, 0);
    write_record(arena.layout, rows, i, record);
    if (is_new) map->insert(hash, slot);
  }
  arena.free(fresh.data() + used, fresh.size() - used);
  map->num_rows.fetch_add(created, std::memory_order_relaxed);
}

}  // namespace shoal
