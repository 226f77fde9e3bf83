// Adding rows in bulk: checkpoints, migrated blocks, and copies that are kept current.
#include <stdexcept>

#include "core/store/checksum.h"
#include "core/store/packed.h"
#include "core/store/rowstore.h"

namespace shoal {

namespace {

// Rows handled under one lock, whose memory accesses overlap.
constexpr int64_t kChunk = 64;

// Rows given as columns.
struct ColumnRows {
  const RowColumns& columns;
  const RecordLayout& layout;

  int64_t id(int64_t i) const { return columns.ids[i]; }
  void write(int64_t i, std::byte* record) const {
    RowHeader* head = header(record);
    head->id = columns.ids[i];
    head->last_step = static_cast<int32_t>(columns.last_step[i]);
    const int64_t count = columns.count[i];
    set_state(head, kExists | (count > kCountMask ? kCountMask : static_cast<uint32_t>(count)));
    if (layout.slot_width != 0) {
      std::memcpy(slots(record), columns.slots + i * layout.slot_width, size_t{layout.slot_width} * 4);
    }
    const size_t weight_bytes = layout.dim * row_type_bytes(layout.type);
    std::memcpy(record + layout.weights_offset, columns.weights + i * weight_bytes, weight_bytes);
  }
};

// Rows as they travel.
struct PackedRows {
  const std::byte* first;
  const PackedLayout layout;

  const std::byte* at(int64_t i) const { return first + static_cast<size_t>(i) * layout.stride; }
  int64_t id(int64_t i) const {
    int64_t id;
    std::memcpy(&id, at(i), sizeof(id));
    return id;
  }
  void write(int64_t i, std::byte* record) const { layout.unpack(at(i), record); }
};

// A list of ids.
struct PackedIds {
  const std::byte* first;
  int64_t id(int64_t i) const {
    int64_t id;
    std::memcpy(&id, first + i * 8, sizeof(id));
    return id;
  }
};

}  // namespace

template <typename Rows>
void RowStore::check_ids(uint32_t table, uint32_t block, const Rows& rows, int64_t n) const {
  const TableDesc& desc = tables_[table];
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t actual = row_block(rows.id(i), desc.log2_blocks);
    if (actual != block) {
      throw std::invalid_argument("table '" + desc.name + "': id " + std::to_string(rows.id(i)) + " belongs to block " +
                                  std::to_string(actual) + ", not to block " + std::to_string(block));
    }
  }
}

void RowStore::import_rows(uint32_t table, uint32_t block, const RowColumns& columns, int64_t n, bool replace) {
  import_from(table, block, ColumnRows{columns, arena_of(table).layout}, n, replace, 0);
}

uint64_t RowStore::import_packed(uint32_t table, uint32_t block, const std::byte* packed, int64_t n, bool replace,
                                 int64_t expected) {
  return import_from(table, block, PackedRows{packed, PackedLayout(arena_of(table).layout)}, n, replace, expected);
}

template <typename Rows>
uint64_t RowStore::import_from(uint32_t table, uint32_t block, const Rows& rows, int64_t n, bool replace,
                               int64_t expected) {
  bool is_owned;
  std::shared_ptr<IdMap> map = require_block(table, block, &is_owned);
  if (is_owned) require_boundary("importing rows");
  check_ids(table, block, rows, n);
  if (replace && is_owned) {
    for (const uint32_t slot : map->list_slots()) {
      const int64_t id = header(arena_of(table).record(slot))->id;
      erase_row(table, map.get(), id, fmix64(static_cast<uint64_t>(id)), slot);
    }
    forget_reservations();
  } else if (replace) {
    drop_block(table, block);
    add_block(table, block, true);
    map = require_block(table, block, &is_owned);
  }
  if (replace && expected > n) map->make_room(static_cast<uint64_t>(expected));
  return upsert(table, map.get(), is_owned, rows, n);
}

uint64_t RowStore::apply_packed(uint32_t table, uint32_t block, const std::byte* packed, int64_t n,
                                int64_t num_deleted) {
  bool is_owned;
  const std::shared_ptr<IdMap> map = require_block(table, block, &is_owned);
  if (is_owned) require_boundary("applying changes");
  const PackedRows rows{packed, PackedLayout(arena_of(table).layout)};
  const PackedIds deleted{packed + static_cast<size_t>(n) * rows.layout.stride};
  check_ids(table, block, rows, n);
  check_ids(table, block, deleted, num_deleted);
  const uint64_t removed = erase_held(table, map.get(), is_owned, deleted, num_deleted);
  return upsert(table, map.get(), is_owned, rows, n) - removed;
}

template <typename Rows>
uint64_t RowStore::upsert(uint32_t table, IdMap* map, bool is_owned, const Rows& rows, int64_t n) {
  uint64_t delta = 0;
  for (int64_t from = 0; from < n; from += kChunk) {
    const int64_t count = std::min(kChunk, n - from);
    map->make_room(static_cast<uint64_t>(count));
    const std::lock_guard<std::mutex> lock(mutex_);
    delta += upsert_chunk(table, map, is_owned, rows, from, count);
  }
  return delta;
}

// Find first, then write: the records' memory arrives while other rows are looked up.
template <typename Rows>
uint64_t RowStore::upsert_chunk(uint32_t table, IdMap* map, bool is_owned, const Rows& rows, int64_t from,
                                int64_t count) {
  Arena& arena = arena_of(table);
  const RowHasher& hasher = *hashers_[tables_[table].arena];
  int64_t ids[kChunk];
  for (int64_t i = 0; i < count; ++i) ids[i] = rows.id(from + i);
  uint32_t found[kChunk], fresh[kChunk];
  const uint32_t missing = find_chunk(*map, arena, ids, count, found);
  arena.allocate(missing, fresh);
  for (uint32_t i = 0; i < missing; ++i) arena.prefetch(fresh[i]);
  const bool is_listed = is_in_open_cut(*map);
  uint32_t used = 0;
  int64_t created = 0;
  uint64_t delta = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = ids[i];
    const uint64_t hash = fmix64(static_cast<uint64_t>(id));
    if (found[i] == kNoSlot) found[i] = map->find(id, hash);  // An earlier row of this call may have had the same id.
    const bool is_new = found[i] == kNoSlot;
    const uint32_t slot = is_new ? fresh[used++] : found[i];
    std::byte* record = arena.record(slot);
    RowHeader* head = header(record);
    if (is_new) {
      head->id = id;
      set_state(head, 0);
    }
    const bool exists = (head->state & kExists) != 0;
    created += !exists;
    if (exists) delta -= hasher.hash(record);
    if (is_owned) {
      if (head->stamp < guard_) save(table, slot, record, 0);
    } else if (is_listed) {
      save_copy(table, map, slot, record);
    }
    rows.write(from + i, record);
    delta += hasher.hash(record);
    if (is_new) map->insert(hash, slot);
  }
  arena.free(fresh + used, missing - used);
  map->num_rows.fetch_add(created, std::memory_order_relaxed);
  return delta;
}

// Slots of ids, kNoSlot where there is none; returns how many those are. The records are on their way to the cache.
uint32_t RowStore::find_chunk(const IdMap& map, const Arena& arena, const int64_t* ids, int64_t count,
                              uint32_t* found) const {
  uint64_t hashes[kChunk];
  for (int64_t i = 0; i < count; ++i) {
    hashes[i] = fmix64(static_cast<uint64_t>(ids[i]));
    __builtin_prefetch(map.bucket(hashes[i]), 1, 3);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Bucket& bucket = *map.bucket(hashes[i]);
    for (uint32_t mask = bucket.match(tag_of_hash(hashes[i])); mask != 0; mask &= mask - 1) {
      arena.prefetch(bucket.slots[__builtin_ctz(mask)]);
    }
  }
  uint32_t missing = 0;
  for (int64_t i = 0; i < count; ++i) {
    found[i] = map.find(ids[i], hashes[i]);
    missing += found[i] == kNoSlot;
  }
  return missing;
}

// Returns the sum of the hashes of the rows that were there.
template <typename Ids>
uint64_t RowStore::erase_held(uint32_t table, IdMap* map, bool is_owned, const Ids& list, int64_t n) {
  const RowHasher& hasher = *hashers_[tables_[table].arena];
  uint64_t removed = 0;
  for (int64_t from = 0; from < n; from += kChunk) {
    const int64_t count = std::min(kChunk, n - from);
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t ids[kChunk];
    for (int64_t i = 0; i < count; ++i) ids[i] = list.id(from + i);
    uint32_t found[kChunk];
    find_chunk(*map, arena_of(table), ids, count, found);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = ids[i];
      const uint64_t hash = fmix64(static_cast<uint64_t>(id));
      if (found[i] == kNoSlot || map->find(id, hash) == kNoSlot) continue;
      const std::byte* record = arena_of(table).record(found[i]);
      if ((header(record)->state & kExists) == 0) continue;
      removed += hasher.hash(record);
      if (is_owned) {
        erase_row(table, map, id, hash, found[i]);
      } else {
        erase_copy(table, map, id, hash, found[i]);
      }
    }
  }
  return removed;
}

// A row of a replica: nothing is kept of it but for the open cuts that list its block from before its demotion.
void RowStore::erase_copy(uint32_t table, IdMap* map, int64_t id, uint64_t hash, uint32_t slot) {
  const uint32_t arena = tables_[table].arena;
  std::byte* record = arenas_[arena]->record(slot);
  RowHeader* head = header(record);
  if (is_in_open_cut(*map)) {
    save_copy(table, map, slot, record);
    layers_.back()->note_deleted(map, slot);
  }
  map->erase(id, hash);
  map->num_rows.fetch_sub(1, std::memory_order_relaxed);
  set_state(head, 0);
  if (is_in_open_layer(*map)) {
    release_slots(arena, &slot, 1);
  } else {
    arenas_[arena]->free(&slot, 1);
  }
}

}  // namespace shoal
