#include "core/store/arena.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <stdexcept>

namespace shoal {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunkBytesMax = size_t{16} << 20;
constexpr uint32_t kChunkShiftMin = 8, kChunkShiftMax = 18;
constexpr size_t kChunksPerRegion = 64;
constexpr uint64_t kSlotsMax = 0xFFFFFFFEull;  // The two highest values mark "no slot" and "absent".
}  // namespace

PageBlock::PageBlock(size_t bytes) : bytes_(bytes) {
  mapped_bytes_ = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<std::byte*>((start + kHugePage - 1) & ~(kHugePage - 1));
#if defined(MADV_HUGEPAGE)
  madvise(data_, mapped_bytes_ - kHugePage, MADV_HUGEPAGE);
#endif
}

PageBlock::~PageBlock() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
}

Arena::Arena(uint32_t dim, uint32_t slot_width, RowType type)
    : layout(dim, slot_width, type), chunks_(nullptr, std::free) {
  chunk_shift_ = kChunkShiftMin;
  while (chunk_shift_ < kChunkShiftMax && (size_t{layout.stride} << (chunk_shift_ + 1)) <= kChunkBytesMax) {
    ++chunk_shift_;
  }
  chunk_mask_ = (1u << chunk_shift_) - 1;
  chunk_bytes_ = size_t{layout.stride} << chunk_shift_;
  const size_t num_chunks_max = size_t{1} << (32 - chunk_shift_);
  chunks_.reset(static_cast<std::atomic<std::byte*>*>(std::calloc(num_chunks_max, sizeof(std::atomic<std::byte*>))));
  if (chunks_ == nullptr) throw std::bad_alloc();
}

void Arena::add_chunk() {
  if (region_left_ == 0) {
    regions_.emplace_back(chunk_bytes_ * kChunksPerRegion);
    region_next_ = regions_.back().data();
    region_left_ = kChunksPerRegion;
  }
  chunks_[num_chunks_++].store(region_next_, std::memory_order_release);
  region_next_ += chunk_bytes_;
  --region_left_;
}

void Arena::allocate(uint64_t count, uint32_t* slots) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (used_ + count > kSlotsMax) throw std::length_error("arena is full: more than 2^32 - 2 rows of one width");
  used_ += count;
  while (count > 0 && !free_.empty()) {
    *slots++ = free_.back();
    free_.pop_back();
    --count;
  }
  uint64_t next = next_slot_.load(std::memory_order_relaxed);
  while ((num_chunks_ << chunk_shift_) < next + count) add_chunk();
  for (; count > 0; --count) *slots++ = static_cast<uint32_t>(next++);
  next_slot_.store(next, std::memory_order_relaxed);
}

void Arena::free(const uint32_t* slots, uint64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.insert(free_.end(), slots, slots + count);
  used_ -= count;
}

}  // namespace shoal
