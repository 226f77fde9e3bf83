// Memory of the arrays handed to Python: 64-byte aligned, recycled. A batch's arrays live for a few steps and have
// about the same sizes each time; taking them from a free list avoids a page fault per 4 KiB of every batch.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace shoal {

class BufferPool {
 public:
  static BufferPool& instance() {
    static BufferPool* pool = new BufferPool();  // Never destroyed: arrays may outlive static destruction.
    return *pool;
  }

  // At least `bytes` bytes. Give it back with the same `bytes`.
  void* take(size_t bytes) {
    const size_t size = size_class(bytes);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = free_.find(size);
      if (found != free_.end() && !found->second.empty()) {
        void* block = found->second.back();
        found->second.pop_back();
        free_bytes_ -= size;
        return block;
      }
    }
    void* block = std::aligned_alloc(64, size);
    if (block == nullptr) throw std::bad_alloc();
    return block;
  }

  void give_back(void* block, size_t bytes) {
    const size_t size = size_class(bytes);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (free_bytes_ + size <= kFreeBytesMax) {
        free_[size].push_back(block);
        free_bytes_ += size;
        return;
      }
    }
    std::free(block);
  }

 private:
  static constexpr size_t kFreeBytesMax = size_t{256} << 20;

  // Quarter steps between powers of two: at most 25 % more than asked for, and few distinct sizes.
  static size_t size_class(size_t bytes) {
    size_t step = 64;
    while (step * 8 < bytes) step *= 2;
    return bytes == 0 ? 64 : (bytes + step - 1) / step * step;
  }

  std::mutex mutex_;
  std::unordered_map<size_t, std::vector<void*>> free_;
  size_t free_bytes_ = 0;
};

// An owned buffer of n elements that gives its memory back unless released to a new owner.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t n) : n_(n), data_(static_cast<T*>(BufferPool::instance().take(n * sizeof(T)))) {}
  Buffer(Buffer&& other) noexcept : n_(other.n_), data_(other.data_) { other.data_ = nullptr; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (data_ != nullptr) BufferPool::instance().give_back(data_, bytes());
  }
  T* data() { return data_; }
  size_t bytes() const { return n_ * sizeof(T); }
  T* release() {
    T* data = data_;
    data_ = nullptr;
    return data;
  }

 private:
  size_t n_;
  T* data_;
};

}  // namespace shoal
