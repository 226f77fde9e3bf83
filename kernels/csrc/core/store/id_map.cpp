#include "core/store/id_map.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace shoal {

namespace {
constexpr uint32_t kNumBucketsMin = 2;
constexpr size_t kHugeBytesMin = size_t{4} << 20;

// Most entries that an array of `num_buckets` holds before it grows: seven eighths of its places.
uint64_t capacity(uint64_t num_buckets) { return num_buckets * Bucket::kPlaces * 7 / 8; }

template <typename T>
void publish(T* place, T value) {
  __atomic_store_n(place, value, __ATOMIC_RELEASE);
}
}  // namespace

// Zeroed buckets; large arrays are huge pages, small ones come from the heap.
struct IdMap::Array {
  explicit Array(uint32_t count) : num_buckets(count) {
    const size_t bytes = size_t{count} * sizeof(Bucket);
    if (bytes >= kHugeBytesMin) {
      pages = PageBlock(bytes);
      buckets = reinterpret_cast<Bucket*>(pages.data());
    } else {
      buckets = static_cast<Bucket*>(std::aligned_alloc(64, bytes));
      if (buckets == nullptr) throw std::bad_alloc();
      std::memset(static_cast<void*>(buckets), 0, bytes);
    }
  }
  ~Array() {
    if (pages.data() == nullptr) std::free(buckets);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  uint32_t num_buckets;
  Bucket* buckets;
  PageBlock pages;
};

IdMap::IdMap(Arena* arena, uint32_t log2_blocks) : arena_(arena), log2_blocks_(log2_blocks) {
  array_ = std::make_shared<Array>(kNumBucketsMin);
  buckets_ = array_->buckets;
  num_buckets_ = array_->num_buckets;
  bytes_.store(uint64_t{num_buckets_} * sizeof(Bucket), std::memory_order_relaxed);
}

IdMap::~IdMap() = default;

uint32_t IdMap::find(int64_t id, uint64_t hash) const {
  const uint8_t tag = tag_of_hash(hash);
  for (uint32_t at = home(hash);; at = next(at)) {
    const Bucket& bucket = buckets_[at];
    for (uint32_t mask = bucket.match(tag); mask != 0; mask &= mask - 1) {
      const uint32_t slot = bucket.slots[__builtin_ctz(mask)];
      if (header(arena_->record(slot))->id == id) return slot;
    }
    if (bucket.passed == 0) return kNoSlot;
  }
}

void IdMap::insert(uint64_t hash, uint32_t slot) {
  if (size_ >= capacity(num_buckets_)) grow(num_buckets_ + (num_buckets_ + 1) / 2);
  ++size_;
  for (uint32_t at = home(hash);; at = next(at)) {
    Bucket& bucket = buckets_[at];
    const uint32_t empty = bucket.match(0);
    if (empty != 0) {
      const uint32_t place = __builtin_ctz(empty);
      publish(&bucket.slots[place], slot);
      publish(&bucket.tags[place], tag_of_hash(hash));
      return;
    }
    ++bucket.passed;
  }
}

bool IdMap::erase(int64_t id, uint64_t hash) {
  const uint8_t tag = tag_of_hash(hash);
  const uint32_t first = home(hash);
  for (uint32_t at = first;; at = next(at)) {
    Bucket& bucket = buckets_[at];
    for (uint32_t mask = bucket.match(tag); mask != 0; mask &= mask - 1) {
      const uint32_t place = __builtin_ctz(mask);
      if (header(arena_->record(bucket.slots[place]))->id != id) continue;
      publish(&bucket.tags[place], uint8_t{0});
      for (uint32_t back = first; back != at; back = next(back)) --buckets_[back].passed;
      --size_;
      return true;
    }
    if (bucket.passed == 0) return false;
  }
}

void IdMap::make_room(uint64_t count) {
  count += size_;
  if (count <= capacity(num_buckets_)) return;
  uint64_t wanted = (count * 8 / 7 + Bucket::kPlaces) / Bucket::kPlaces;
  while (capacity(wanted) < count) ++wanted;
  grow(std::max<uint64_t>(wanted, num_buckets_ + (num_buckets_ + 1) / 2));
}

// Rebuild into a larger array. The ids come from the records, prefetched a few buckets ahead; the destination is
// walked almost in order because multiply-shift keeps the order of hashes.
void IdMap::grow(uint64_t num_buckets) {
  constexpr uint32_t kAhead = 4;
  const std::shared_ptr<Array> old = array_;
  const auto fresh = std::make_shared<Array>(static_cast<uint32_t>(num_buckets));
  buckets_ = fresh->buckets;
  num_buckets_ = fresh->num_buckets;
  bytes_.store(uint64_t{num_buckets_} * sizeof(Bucket), std::memory_order_relaxed);
  size_ = 0;
  const auto prefetch = [&](uint32_t at) {
    const Bucket& bucket = old->buckets[at];
    for (uint32_t i = 0; i < Bucket::kPlaces; ++i) {
      if (bucket.tags[i] != 0) arena_->prefetch_header(bucket.slots[i]);
    }
  };
  for (uint32_t at = 0; at < kAhead && at < old->num_buckets; ++at) prefetch(at);
  for (uint32_t at = 0; at < old->num_buckets; ++at) {
    if (at + kAhead < old->num_buckets) prefetch(at + kAhead);
    const Bucket& bucket = old->buckets[at];
    for (uint32_t i = 0; i < Bucket::kPlaces; ++i) {
      if (bucket.tags[i] == 0) continue;
      const uint32_t slot = bucket.slots[i];
      insert(fmix64(static_cast<uint64_t>(header(arena_->record(slot))->id)), slot);
    }
  }
  const std::lock_guard<std::mutex> lock(array_mutex_);
  array_ = fresh;
}

std::vector<uint32_t> IdMap::list_slots() const {
  std::shared_ptr<Array> array;
  {
    const std::lock_guard<std::mutex> lock(array_mutex_);
    array = array_;
  }
  std::vector<uint32_t> slots;
  slots.reserve(size_t{array->num_buckets} * Bucket::kPlaces);
  for (uint32_t at = 0; at < array->num_buckets; ++at) {
    Bucket& bucket = array->buckets[at];
    for (uint32_t i = 0; i < Bucket::kPlaces; ++i) {
      if (__atomic_load_n(&bucket.tags[i], __ATOMIC_ACQUIRE) == 0) continue;
      slots.push_back(__atomic_load_n(&bucket.slots[i], __ATOMIC_RELAXED));
    }
  }
  return slots;
}

}  // namespace shoal
