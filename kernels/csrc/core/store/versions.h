// Saved records: the undo log of a step and the layers behind cuts (PROTOCOLS C1, C2).
//
// The versioned thing is the slot. A layer holds, for every slot first written after the layer opened, the record as it
// was (or "absent"). Every layer has a serial from one growing counter, and a record's stamp is the serial up to which
// its slot has been saved: "stamp >= serial" means "this layer has the slot", one compare on a line that the update
// reads anyway.
//
// Readers of a cut run beside the writers without locks. A writer publishes the saved record, then fences, then writes
// the row; a reader copies the row, then fences, then looks for a saved record. If the copy saw any byte of the write,
// the look-up sees the saved record, and the copy is thrown away. This is a sequence lock whose sequence number is the
// saved record itself, so it needs no counter and allows any number of writing threads.
//
// A slot that a layer knows, or that a cut may still list, is not given to another row before that layer is gone: it is
// retired into the newest layer and freed with it. So as long as a layer lives, a slot stands for one (table, id), and
// the layers between two cuts name exactly the rows that may differ between them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/store/arena.h"

namespace shoal {

// Recycles memory blocks of 2 MB: a page fault costs more than filling the page.
class SlabPool {
 public:
  static constexpr size_t kSlabBytes = size_t{2} << 20;
  PageBlock get();
  void put(PageBlock slab);

 private:
  static constexpr size_t kKept = 128;
  std::mutex mutex_;
  std::vector<PageBlock> free_;
};

class IdMap;

struct SavedHead {
  uint32_t table;
  uint32_t slot;
  const std::byte* record() const { return reinterpret_cast<const std::byte*>(this + 1); }
  int64_t id() const { return header(record())->id; }
};

// An append-only list of copied records (or only their first bytes) of one arena. Each writing thread appends to a slab
// of its own.
class SavedRecords {
 public:
  SavedRecords(uint32_t record_bytes, uint32_t num_threads, SlabPool* pool);
  ~SavedRecords() { clear(); }

  // Copy a record; returns its number, valid until clear().
  uint32_t append(uint32_t table, uint32_t slot, const std::byte* record, uint32_t thread);
  const SavedHead* entry(uint32_t number) const {
    const std::byte* slab = slabs_[number / entries_per_slab_].load(std::memory_order_acquire);
    return reinterpret_cast<const SavedHead*>(slab + kSlabHeaderBytes + (number % entries_per_slab_) * entry_bytes_);
  }
  void clear();
  // Entries so far; any thread.
  uint64_t count() const;
  uint64_t bytes() const { return count() * entry_bytes_; }

  // Every saved record, in no particular order; not beside a writer.
  template <typename F>
  void for_each(F&& visit) const {
    for (uint32_t slab = 0; slab < num_slabs_; ++slab) {
      const uint32_t used = used_of(slabs_[slab].load()).load();
      for (uint32_t i = 0; i < used; ++i) visit(*entry(slab * entries_per_slab_ + i));
    }
  }

 private:
  static constexpr size_t kSlabHeaderBytes = 64;
  static constexpr uint32_t kSlabsMax = 1u << 16;
  struct alignas(64) Cursor {
    std::byte* slab = nullptr;
    uint32_t number = 0;  // Of the slab's first entry.
    uint32_t used = 0;
  };
  // Entries of a slab: its first word. Written by the slab's thread, read by whoever counts.
  static std::atomic<uint32_t>& used_of(std::byte* slab) { return *reinterpret_cast<std::atomic<uint32_t>*>(slab); }
  void next_slab(Cursor* cursor);

  uint32_t record_bytes_, entry_bytes_, entries_per_slab_;
  SlabPool* pool_;
  std::vector<Cursor> cursors_;
  std::unique_ptr<std::atomic<std::byte*>[], void (*)(void*)> slabs_;
  mutable std::mutex mutex_;
  std::vector<PageBlock> owned_;
  uint32_t num_slabs_ = 0;
};

// One arena's part of a cut layer: saved records with an index by slot.
class ArenaLayer {
 public:
  static constexpr uint32_t kNone = 0;
  static constexpr uint32_t kAbsent = 0xFFFFFFFFu;

  ArenaLayer(const Arena& arena, uint32_t num_threads, SlabPool* pool);
  ~ArenaLayer();

  // Save a slot unless this layer has it. Where no row `exists` only the id of `record` is kept, that of the row which
  // is about to be.
  void save(uint32_t table, uint32_t slot, const std::byte* record, bool exists, uint32_t thread);
  // kNone, kAbsent or the number of a saved record plus one.
  uint32_t find(uint32_t slot) const {
    const std::atomic<uint32_t>* codes = index_[slot >> shift_].load(std::memory_order_acquire);
    return codes == nullptr ? kNone : codes[slot & mask_].load(std::memory_order_acquire);
  }
  void prefetch(uint32_t slot) const {
    const std::atomic<uint32_t>* codes = index_[slot >> shift_].load(std::memory_order_acquire);
    if (codes != nullptr) __builtin_prefetch(codes + (slot & mask_), 0, 3);
  }
  const SavedHead* saved(uint32_t code) const { return records_.entry(code - 1); }
  // Add everything of a younger layer that this one does not have.
  void absorb(const ArenaLayer& younger);
  // What was saved: the rows that were there, and (by id only) those that were not. Not beside a writer.
  const SavedRecords& records() const { return records_; }
  const SavedRecords& absents() const { return absents_; }
  uint64_t count() const { return records_.count() + absents_.count(); }
  uint64_t bytes() const {
    return records_.bytes() + absents_.bytes() + (uint64_t{num_indexed_.load()} << shift_) * 4;
  }

 private:
  std::atomic<uint32_t>* codes_of(uint32_t slot);

  uint32_t shift_, mask_, num_chunks_max_;
  SavedRecords records_;
  SavedRecords absents_;
  std::unique_ptr<std::atomic<std::atomic<uint32_t>*>[], void (*)(void*)> index_;
  std::atomic<uint32_t> num_indexed_{0};
};

// The rows that changed since a cut, as they were at the cut.
class CutLayer {
 public:
  CutLayer(uint32_t serial_, const std::vector<std::unique_ptr<Arena>>& arenas, uint32_t num_threads, SlabPool* pool);
  void note_deleted(const IdMap* map, uint32_t slot);
  // Slots of rows that were deleted from `map` since the layer opened.
  std::vector<uint32_t> deleted(const IdMap* map) const;
  // Keep slots from being used again while this layer lives.
  void retire(uint32_t arena, const uint32_t* slots, size_t count);
  // The retired slots by arena, for the store that frees them or takes some back into use.
  std::vector<std::vector<uint32_t>>& retired() { return retired_; }
  void absorb(CutLayer& younger);
  // Rows saved so far, an upper bound of the rows that changed; any thread.
  uint64_t count() const;
  uint64_t bytes() const;

  const uint32_t serial;
  std::vector<std::unique_ptr<ArenaLayer>> arenas;
  std::atomic<bool> is_released{false};
  // Held while the saved rows are listed or others are absorbed.
  std::mutex entries_mutex;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const IdMap*, std::vector<uint32_t>> deleted_;
  std::vector<std::vector<uint32_t>> retired_;
};

// Everything that undoes one step.
struct StepLog {
  StepLog(const std::vector<std::unique_ptr<Arena>>& arenas, uint32_t num_threads, SlabPool* pool);
  void clear();
  uint64_t bytes() const;

  uint32_t step = 0;
  uint32_t serial = 0;
  std::vector<std::unique_ptr<SavedRecords>> arenas;
  // Slots of rows deleted in this step, by arena; they are reused only after the commit.
  std::vector<std::vector<uint32_t>> deleted;
};

}  // namespace shoal
