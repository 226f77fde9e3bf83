// Map from the ids of one (table, row block) to slots.
//
// Buckets of one cache line hold 12 one-byte tags and 12 slots; tag 0 marks an empty place, so no id value is
// reserved. The id itself lives in the row's record: a find touches the bucket and the record that the caller reads
// next. A full bucket overflows into the next one and counts what passed through it, so deletion needs no tombstones
// and a miss stops at the first bucket that nothing passed. Buckets are chosen by multiply-shift, so their number need
// not be a power of two (growth by half, load 0.58 to 0.875: 6.1 to 9.2 bytes per row) and growth keeps their order.
//
// One writer; the entries may be listed from other threads meanwhile (`list_slots`): entries never move inside an
// array, and an array that growth replaced stays alive until its last reader has let go of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/store/arena.h"
#include "core/store/hash.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace shoal {

struct alignas(64) Bucket {
  static constexpr uint32_t kPlaces = 12;
  uint8_t tags[kPlaces];
  uint32_t passed;  // Entries that belong to this or an earlier bucket and are stored further on.
  uint32_t slots[kPlaces];

  // Bit i is set where tags[i] == tag.
  uint32_t match(uint8_t tag) const {
#if defined(__SSE2__)
    const __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(tags));
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(line, _mm_set1_epi8(static_cast<char>(tag))))) &
           0xFFFu;
#else
    uint32_t mask = 0;
    for (uint32_t i = 0; i < kPlaces; ++i) mask |= static_cast<uint32_t>(tags[i] == tag) << i;
    return mask;
#endif
  }
};
static_assert(sizeof(Bucket) == 64);

// The tag and home bucket of an id come from different bits of its mixed hash than its row block.
inline uint8_t tag_of_hash(uint64_t hash) {
  const uint8_t tag = static_cast<uint8_t>(hash);
  return tag == 0 ? 1 : tag;
}

class IdMap {
 public:
  IdMap(Arena* arena, uint32_t log2_blocks);
  ~IdMap();
  IdMap(const IdMap&) = delete;
  IdMap& operator=(const IdMap&) = delete;

  uint32_t home(uint64_t hash) const {
    return static_cast<uint32_t>((((hash << log2_blocks_) >> 32) * num_buckets_) >> 32);
  }
  const Bucket* bucket(uint64_t hash) const { return buckets_ + home(hash); }
  const Bucket* after(const Bucket* bucket) const {
    return bucket + 1 == buckets_ + num_buckets_ ? buckets_ : bucket + 1;
  }

  // Slot of an id, kNoSlot if it is not here. `hash` = fmix64(id).
  uint32_t find(int64_t id, uint64_t hash) const;
  // Add an id that is not here. The record at `slot` must already hold the id.
  void insert(uint64_t hash, uint32_t slot);
  // Remove an id; false if it is not here.
  bool erase(int64_t id, uint64_t hash);
  // Make room for `count` more entries.
  void make_room(uint64_t count);

  uint64_t size() const { return size_; }
  // Any thread.
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  // All slots stored at some moment during the call; safe beside the writer. Entries added or erased meanwhile may or
  // may not be listed.
  std::vector<uint32_t> list_slots() const;

  // Rows of this block that exist (reserved ones do not count). Any thread.
  std::atomic<int64_t> num_rows{0};
  // Serial of the newest cut that this map is part of; guarded by the store's mutex, as is the next one.
  uint32_t cut_serial = 0;
  // Layers up to this serial may hold slots of this map, of a replica's at least: it was owned, or saved to them.
  uint32_t layer_serial = 0;

 private:
  struct Array;
  void grow(uint64_t num_buckets);
  uint32_t next(uint32_t bucket) const { return bucket + 1 == num_buckets_ ? 0 : bucket + 1; }

  Arena* arena_;
  uint32_t log2_blocks_;
  uint32_t num_buckets_ = 0;
  Bucket* buckets_ = nullptr;
  uint64_t size_ = 0;
  std::atomic<uint64_t> bytes_{0};
  std::shared_ptr<Array> array_;
  mutable std::mutex array_mutex_;  // Guards the pointer array_ between growth and list_slots, nothing else.
};

}  // namespace shoal
