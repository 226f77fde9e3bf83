// Fixed-size chunks of records. Growth maps new chunks and copies nothing; a slot never moves.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/store/record.h"

namespace shoal {

// Anonymous memory, 2 MB aligned, huge pages asked for, zeroed by the kernel at first touch.
class PageBlock {
 public:
  PageBlock() = default;
  explicit PageBlock(size_t bytes);
  PageBlock(PageBlock&& other) noexcept { swap(other); }
  PageBlock& operator=(PageBlock&& other) noexcept {
    swap(other);
    return *this;
  }
  PageBlock(const PageBlock&) = delete;
  PageBlock& operator=(const PageBlock&) = delete;
  ~PageBlock();
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void swap(PageBlock& other) noexcept {
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// All rows of one (width, row type, optimizer state width). Slots are handed out in batches under a lock; reading a
// record is lock-free from any thread.
class Arena {
 public:
  Arena(uint32_t dim, uint32_t slot_width, RowType type);

  const RecordLayout layout;

  std::byte* record(uint32_t slot) const {
    return chunks_[slot >> chunk_shift_].load(std::memory_order_relaxed) + size_t{slot & chunk_mask_} * layout.stride;
  }
  const std::byte* weights(uint32_t slot) const { return record(slot) + layout.weights_offset; }
  void prefetch(uint32_t slot) const { prefetch_range(record(slot), layout.stride); }
  void prefetch_header(uint32_t slot) const { __builtin_prefetch(record(slot), 0, 3); }

  // Slots for `count` new records, reusing freed ones first. Raises CapacityError (std::length_error) when 2^32 - 2
  // slots are in use.
  void allocate(uint64_t count, uint32_t* slots);
  void free(const uint32_t* slots, uint64_t count);

  uint32_t chunk_shift() const { return chunk_shift_; }
  // Bytes of all slots ever handed out: what the arena holds in memory.
  uint64_t bytes() const { return next_slot_.load(std::memory_order_relaxed) * layout.stride; }

 private:
  void add_chunk();

  uint32_t chunk_shift_ = 0;
  uint32_t chunk_mask_ = 0;
  size_t chunk_bytes_ = 0;
  std::unique_ptr<std::atomic<std::byte*>[], void (*)(void*)> chunks_;  // calloc: untouched pages cost nothing.
  uint64_t num_chunks_ = 0;
  std::vector<PageBlock> regions_;  // Chunks are cut from larger regions so that no page is wasted between them.
  size_t region_left_ = 0;
  std::byte* region_next_ = nullptr;
  std::mutex mutex_;
  std::vector<uint32_t> free_;
  std::atomic<uint64_t> next_slot_{0};  // Changed under the mutex.
  uint64_t used_ = 0;
};

}  // namespace shoal
