#include "core/store/versions.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace shoal {

namespace {
template <typename T>
T* zeroed(size_t count) {
  T* memory = static_cast<T*>(std::calloc(count, sizeof(T)));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

PageBlock SlabPool::get() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      PageBlock slab = std::move(free_.back());
      free_.pop_back();
      return slab;
    }
  }
  return PageBlock(kSlabBytes);
}

void SlabPool::put(PageBlock slab) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.size() < kKept) free_.push_back(std::move(slab));
}

SavedRecords::SavedRecords(uint32_t record_bytes, uint32_t num_threads, SlabPool* pool)
    : record_bytes_(record_bytes),
      entry_bytes_(static_cast<uint32_t>(sizeof(SavedHead)) + record_bytes),
      entries_per_slab_(static_cast<uint32_t>((SlabPool::kSlabBytes - kSlabHeaderBytes) / entry_bytes_)),
      pool_(pool),
      cursors_(num_threads),
      slabs_(zeroed<std::atomic<std::byte*>>(kSlabsMax), std::free) {}

void SavedRecords::next_slab(Cursor* cursor) {
  PageBlock slab = pool_->get();
  cursor->slab = slab.data();
  cursor->used = 0;
  used_of(slab.data()).store(0, std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_slabs_ == kSlabsMax) throw std::length_error("too many saved row versions");
  cursor->number = num_slabs_ * entries_per_slab_;
  slabs_[num_slabs_++].store(slab.data(), std::memory_order_release);
  owned_.push_back(std::move(slab));
}

uint32_t SavedRecords::append(uint32_t table, uint32_t slot, const std::byte* record, uint32_t thread) {
  Cursor& cursor = cursors_[thread];
  if (cursor.slab == nullptr || cursor.used == entries_per_slab_) next_slab(&cursor);
  std::byte* to = cursor.slab + kSlabHeaderBytes + size_t{cursor.used} * entry_bytes_;
  const SavedHead head{table, slot};
  std::memcpy(to, &head, sizeof(head));
  std::memcpy(to + sizeof(head), record, record_bytes_);
  const uint32_t number = cursor.number + cursor.used;
  used_of(cursor.slab).store(++cursor.used, std::memory_order_release);
  return number;
}

void SavedRecords::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (PageBlock& slab : owned_) pool_->put(std::move(slab));
  owned_.clear();
  num_slabs_ = 0;
  std::fill(cursors_.begin(), cursors_.end(), Cursor{});
}

uint64_t SavedRecords::count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t entries = 0;
  for (const PageBlock& slab : owned_) entries += used_of(slab.data()).load(std::memory_order_relaxed);
  return entries;
}

ArenaLayer::ArenaLayer(const Arena& arena, uint32_t num_threads, SlabPool* pool)
    : shift_(arena.chunk_shift()),
      mask_((1u << arena.chunk_shift()) - 1),
      num_chunks_max_(1u << (32 - arena.chunk_shift())),
      records_(arena.layout.stride, num_threads, pool),
      absents_(sizeof(RowHeader::id), num_threads, pool),
      index_(zeroed<std::atomic<std::atomic<uint32_t>*>>(num_chunks_max_), std::free) {}

ArenaLayer::~ArenaLayer() {
  uint32_t left = num_indexed_.load();
  for (uint32_t chunk = 0; left > 0 && chunk < num_chunks_max_; ++chunk) {
    std::atomic<uint32_t>* codes = index_[chunk].load();
    if (codes == nullptr) continue;
    std::free(codes);
    --left;
  }
}

std::atomic<uint32_t>* ArenaLayer::codes_of(uint32_t slot) {
  auto& place = index_[slot >> shift_];
  std::atomic<uint32_t>* codes = place.load(std::memory_order_acquire);
  if (codes != nullptr) return codes;
  std::atomic<uint32_t>* fresh = zeroed<std::atomic<uint32_t>>(size_t{1} << shift_);
  if (place.compare_exchange_strong(codes, fresh, std::memory_order_acq_rel)) {
    num_indexed_.fetch_add(1);
    return fresh;
  }
  std::free(fresh);
  return codes;
}

void ArenaLayer::save(uint32_t table, uint32_t slot, const std::byte* record, bool exists, uint32_t thread) {
  std::atomic<uint32_t>& code = codes_of(slot)[slot & mask_];
  if (code.load(std::memory_order_relaxed) != kNone) return;
  uint32_t saved = kAbsent;
  if (exists) {
    saved = records_.append(table, slot, record, thread) + 1;
  } else {
    absents_.append(table, slot, record, thread);
  }
  code.store(saved, std::memory_order_release);
}

void ArenaLayer::absorb(const ArenaLayer& younger) {
  younger.records_.for_each([&](const SavedHead& head) { save(head.table, head.slot, head.record(), true, 0); });
  younger.absents_.for_each([&](const SavedHead& head) { save(head.table, head.slot, head.record(), false, 0); });
}

CutLayer::CutLayer(uint32_t serial_, const std::vector<std::unique_ptr<Arena>>& of, uint32_t num_threads,
                   SlabPool* pool)
    : serial(serial_), retired_(of.size()) {
  for (const auto& arena : of) arenas.push_back(std::make_unique<ArenaLayer>(*arena, num_threads, pool));
}

void CutLayer::note_deleted(const IdMap* map, uint32_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  deleted_[map].push_back(slot);
}

std::vector<uint32_t> CutLayer::deleted(const IdMap* map) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = deleted_.find(map);
  return found == deleted_.end() ? std::vector<uint32_t>{} : found->second;
}

void CutLayer::retire(uint32_t arena, const uint32_t* slots, size_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  retired_[arena].insert(retired_[arena].end(), slots, slots + count);
}

void CutLayer::absorb(CutLayer& younger) {
  for (size_t i = 0; i < arenas.size(); ++i) {
    arenas[i]->absorb(*younger.arenas[i]);
    retire(static_cast<uint32_t>(i), younger.retired_[i].data(), younger.retired_[i].size());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::lock_guard<std::mutex> other(younger.mutex_);
  for (const auto& [map, slots] : younger.deleted_) {
    std::vector<uint32_t>& all = deleted_[map];
    all.insert(all.end(), slots.begin(), slots.end());
  }
}

uint64_t CutLayer::count() const {
  uint64_t total = 0;
  for (const auto& arena : arenas) total += arena->count();
  return total;
}

uint64_t CutLayer::bytes() const {
  uint64_t total = 0;
  for (const auto& arena : arenas) total += arena->bytes();
  return total;
}

StepLog::StepLog(const std::vector<std::unique_ptr<Arena>>& of, uint32_t num_threads, SlabPool* pool)
    : deleted(of.size()) {
  for (const auto& arena : of) arenas.push_back(std::make_unique<SavedRecords>(arena->layout.stride, num_threads, pool));
}

void StepLog::clear() {
  for (auto& arena : arenas) arena->clear();
  for (auto& slots : deleted) slots.clear();
}

uint64_t StepLog::bytes() const {
  uint64_t total = 0;
  for (const auto& arena : arenas) total += arena->bytes();
  return total;
}

}  // namespace shoal
