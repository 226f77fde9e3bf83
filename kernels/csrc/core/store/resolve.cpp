// Ids to slots: batched finds, reservations, deletion.
#include <stdexcept>

#include "core/store/rowstore.h"

namespace shoal {

namespace {

// Finds in flight per pass: enough to hide a memory access behind the others' work.
constexpr int kGroup = 64;

// One group of finds. Each pass does the part of all its finds whose memory the pass before has asked for: `start`
// asks for the buckets, `match` compares tags and asks for the records, `finish` compares ids.
struct FindGroup {
  const IdMap* maps[kGroup];
  uint64_t hashes[kGroup];
  const Bucket* buckets[kGroup];
  int count = 0;
  int64_t first = 0;

  // False if the block of some id is not owned; `count` is then its position in the group.
  bool start(const std::shared_ptr<IdMap>* blocks, uint32_t log2_blocks, const int64_t* ids, int64_t from, int64_t n) {
    first = from;
    const int wanted = static_cast<int>(n - from < kGroup ? n - from : kGroup);
    for (count = 0; count < wanted; ++count) {
      const uint64_t hash = fmix64(static_cast<uint64_t>(ids[from + count]));
      const IdMap* map = blocks[block_of_hash(hash, log2_blocks)].get();
      if (map == nullptr) return false;
      const Bucket* bucket = map->bucket(hash);
      __builtin_prefetch(bucket, 0, 3);
      maps[count] = map;
      hashes[count] = hash;
      buckets[count] = bucket;
    }
    return true;
  }

  // Candidates: the slot behind the first equal tag, kNoSlot where no tag is equal. Entries that an overflowed bucket
  // passed on are in the next one, usually in the same pair of lines.
  void match(const Arena& arena, uint32_t* slots) const {
    int passed[kGroup];
    int num_passed = 0;
    for (int i = 0; i < count; ++i) {
      const Bucket& bucket = *buckets[i];
      slots[first + i] = candidate(arena, bucket, i);
      if (slots[first + i] == kNoSlot && bucket.passed != 0) {
        __builtin_prefetch(maps[i]->after(buckets[i]), 0, 3);
        passed[num_passed++] = i;
      }
    }
    for (int at = 0; at < num_passed; ++at) {
      const int i = passed[at];
      slots[first + i] = candidate(arena, *maps[i]->after(buckets[i]), i);
    }
  }

  // What the candidate does not settle (a tag equal by chance, a longer overflow) is looked up from the start, by now
  // mostly in cache.
  void finish(const Arena& arena, const int64_t* ids, uint32_t* slots, std::vector<int64_t>* missing) const {
    for (int i = 0; i < count; ++i) {
      const int64_t at = first + i;
      uint32_t slot = slots[at];
      if (slot != kNoSlot && header(arena.record(slot))->id == ids[at]) continue;
      if (slot != kNoSlot || buckets[i]->passed != 0) slots[at] = slot = maps[i]->find(ids[at], hashes[i]);
      if (slot == kNoSlot && missing != nullptr) missing->push_back(at);
    }
  }

 private:
  uint32_t candidate(const Arena& arena, const Bucket& bucket, int i) const {
    const uint32_t mask = bucket.match(tag_of_hash(hashes[i]));
    if (mask == 0) return kNoSlot;
    for (uint32_t more = mask & (mask - 1); more != 0; more &= more - 1) {
      arena.prefetch_header(bucket.slots[__builtin_ctz(more)]);
    }
    const uint32_t slot = bucket.slots[__builtin_ctz(mask)];
    arena.prefetch_header(slot);
    return slot;
  }
};

}  // namespace

// Two groups alternate, so that one group's memory arrives while the other computes.
int64_t RowStore::find_all(uint32_t table, const int64_t* ids, int64_t n, uint32_t* slots,
                           std::vector<int64_t>* missing) {
  const Arena& arena = arena_of(table);
  const auto* blocks = states_[table].blocks.data();
  const uint32_t log2_blocks = tables_[table].log2_blocks;
  FindGroup groups[2];
  for (int64_t from = 0, turn = 0; from < n + kGroup; from += kGroup, turn ^= 1) {
    FindGroup& next = groups[turn];
    FindGroup& last = groups[turn ^ 1];
    next.count = 0;
    if (from < n && !next.start(blocks, log2_blocks, ids, from, n)) return from + next.count;
    last.finish(arena, ids, slots, missing);
    next.match(arena, slots);
  }
  return -1;
}

int64_t RowStore::resolve(uint32_t table, const int64_t* ids, int64_t n, uint32_t* slots, bool reserve) {
  if (!reserve) return find_all(table, ids, n, slots, nullptr);
  std::vector<int64_t> missing;
  const int64_t bad = find_all(table, ids, n, slots, &missing);
  if (bad < 0 && !missing.empty()) reserve_rows(table, ids, missing, slots);
  return bad;
}

// The record is complete before its entry appears in the id map, where readers of cuts may meet it.
void RowStore::reserve_rows(uint32_t table, const int64_t* ids, const std::vector<int64_t>& missing, uint32_t* slots) {
  Arena& arena = arena_of(table);
  std::vector<uint32_t> fresh(missing.size());
  arena.allocate(fresh.size(), fresh.data());
  constexpr size_t kAhead = 8;
  size_t used = 0;
  for (size_t i = 0; i < missing.size(); ++i) {
    if (i + kAhead < missing.size()) {
      const uint64_t later = fmix64(static_cast<uint64_t>(ids[missing[i + kAhead]]));
      __builtin_prefetch(block(table, later)->bucket(later), 1, 3);
      arena.prefetch(fresh[i + kAhead]);
    }
    const int64_t at = missing[i], id = ids[at];
    const uint64_t hash = fmix64(static_cast<uint64_t>(id));
    IdMap* map = block(table, hash);
    slots[at] = map->find(id, hash);  // An earlier position of this call may have made it.
    if (slots[at] != kNoSlot) continue;
    const uint32_t slot = fresh[used++];
    materialise(tables_[table], arena.layout, id, arena.record(slot));
    map->insert(hash, slot);
    slots[at] = slot;
  }
  arena.free(fresh.data() + used, fresh.size() - used);
  const std::lock_guard<std::mutex> lock(reservations_mutex_);
  for (size_t i = 0; i < used; ++i) reservations_.push_back({table, fresh[i]});
}

void RowStore::discard_reservations() { discard_reservations(nullptr); }

// Of one block (`only`) or of all. Blocks that are no longer owned have none.
void RowStore::discard_reservations(const IdMap* only) {
  const std::lock_guard<std::mutex> lock(reservations_mutex_);
  size_t kept = 0;
  for (const Reservation& reservation : reservations_) {
    RowHeader* head = header(arena_of(reservation.table).record(reservation.slot));
    if ((state_of(*head) & kReserved) == 0) continue;
    const uint64_t hash = fmix64(static_cast<uint64_t>(head->id));
    IdMap* map = block(reservation.table, hash);
    if (map == nullptr || map->find(head->id, hash) != reservation.slot) continue;
    if (only != nullptr && map != only) {
      reservations_[kept++] = reservation;
      continue;
    }
    map->erase(head->id, hash);
    head->state = 0;
    release_slots(tables_[reservation.table].arena, &reservation.slot, 1);
  }
  reservations_.resize(kept);
  reservations_checked_ = kept;
}

// Drop list entries whose row exists by now; called once the list has doubled, so it costs a constant per reservation.
void RowStore::forget_reservations() {
  const std::lock_guard<std::mutex> lock(reservations_mutex_);
  constexpr size_t kWorthwhile = 4096;
  if (reservations_.size() < 2 * reservations_checked_ + kWorthwhile) return;
  size_t kept = 0;
  for (const Reservation& reservation : reservations_) {
    if ((state_of(*header(arena_of(reservation.table).record(reservation.slot))) & kReserved) == 0) continue;
    reservations_[kept++] = reservation;
  }
  reservations_.resize(kept);
  reservations_checked_ = kept;
}

int64_t RowStore::lookup(uint32_t table, const int64_t* ids, int64_t n, float* out) {
  std::vector<uint32_t> slots(static_cast<size_t>(n));
  const int64_t bad = find_all(table, ids, n, slots.data(), nullptr);
  if (bad >= 0) return bad;
  const TableDesc& desc = tables_[table];
  const Arena& arena = arena_of(table);
  constexpr int64_t kAhead = 8;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n && slots[i + kAhead] != kNoSlot) arena.prefetch(slots[i + kAhead]);
    float* row = out + i * desc.dim;
    if (slots[i] == kNoSlot) {
      initial_row(desc, ids[i], row);
    } else {
      decode_row(desc.type, arena.weights(slots[i]), desc.dim, row);
    }
  }
  return -1;
}

int64_t RowStore::erase(uint32_t table, const int64_t* ids, int64_t n) {
  int64_t erased = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = fmix64(static_cast<uint64_t>(ids[i]));
    IdMap* map = block(table, hash);
    const uint32_t slot = map == nullptr ? kNoSlot : map->find(ids[i], hash);
    if (slot == kNoSlot) continue;
    if ((header(arena_of(table).record(slot))->state & kExists) == 0) continue;
    erase_row(table, map, ids[i], hash, slot);
    ++erased;
  }
  return erased;
}

// Saved first (C2); readers of a cut find the row through the layer's list of deleted slots once the map forgets it.
void RowStore::erase_row(uint32_t table, IdMap* map, int64_t id, uint64_t hash, uint32_t slot) {
  Arena& arena = arena_of(table);
  std::byte* record = arena.record(slot);
  RowHeader* head = header(record);
  const bool exists = (head->state & kExists) != 0;
  if (head->stamp < guard_) save(table, slot, record, 0);
  if (exists && !layers_.empty()) layers_.back()->note_deleted(map, slot);
  map->erase(id, hash);
  if (exists) map->num_rows.fetch_sub(1, std::memory_order_relaxed);
  head->state = 0;
  if (logs_.empty()) {
    release_slots(tables_[table].arena, &slot, 1);
  } else {
    logs_.back()->deleted[tables_[table].arena].push_back(slot);
  }
}

}  // namespace shoal
