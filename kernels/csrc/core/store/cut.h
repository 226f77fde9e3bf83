// Reading rows out: a frozen view of the store (PROTOCOLS C1), a block's rows in the order of ids, and what changed in
// it between two cuts.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/store/rowstore.h"

namespace shoal {

// The rows that may differ between an older cut and this one, by block; each slot once.
struct ChangeIndex {
  struct Change {
    const SavedHead* head;  // As saved by the oldest layer that has it: with the record if the row `existed`.
    uint32_t slot;
    bool existed;
  };
  uint32_t since_serial = 0;
  std::vector<size_t> starts;  // By table and block, one more than there are blocks.
  std::vector<Change> changes;
  // What the heads are in, but for the older cut's own layer: that lives as long as the older cut.
  std::vector<std::shared_ptr<CutLayer>> layers;
};

// A frozen view of the store as it was when the cut was opened; opened by the training thread at a step boundary,
// readable from any thread while training goes on. Holds the store's versions until released or destroyed.
class Cut {
 public:
  explicit Cut(RowStore& store);
  ~Cut() { release(); }
  Cut(const Cut&) = delete;
  Cut& operator=(const Cut&) = delete;

  // Waits for an export of this cut that is under way. The memory returns at the store's next step boundary.
  void release();
  // Make the store read as this cut does (RowStore::roll_back). Training thread.
  void roll_back(uint32_t step);
  // An upper bound of the rows, of all blocks, that differ between an older open cut and this one.
  uint64_t num_changed(Cut& since);

 private:
  friend class CutReader;
  friend class BlockExport;
  friend class BlockPack;
  friend class ChangePack;
  void require_open() const;
  void require_older(const Cut& since) const;
  std::vector<std::shared_ptr<CutLayer>> layers_after(const Cut& since) const;
  std::shared_ptr<const ChangeIndex> changes_since(const Cut& since);

  RowStore& store_;
  RowStore::Blocks blocks_;  // Filled as the layer is opened, hence declared before it.
  std::shared_ptr<CutLayer> layer_;
  std::shared_ptr<const ChangeIndex> index_;
  std::mutex mutex_;  // Held by exports; release waits for it.
};

// Reads rows of one table as they were at a cut. `cut` null: as they are now, by the thread that may write them.
class CutReader {
 public:
  CutReader(RowStore& store, const Cut* cut, uint32_t table);
  void prefetch(uint32_t slot) const;
  // The record of a slot, valid until the next read; null if no row was there.
  const std::byte* read(uint32_t slot);
  // Slots of rows that were deleted from the map since the cut.
  std::vector<uint32_t> deleted(const IdMap* map);

 private:
  // The record that was saved since the cut: null if none was, or (`is_absent`) if there was no row at the cut.
  const SavedHead* find_saved(uint32_t slot, bool* is_absent) const;
  void refresh_layers();

  RowStore& store_;
  const Cut* cut_;
  const uint32_t arena_index_;
  const Arena& arena_;
  std::vector<std::shared_ptr<CutLayer>> layers_;
  uint64_t layers_version_ = 0;
  std::unique_ptr<uint64_t[]> scratch_;
};

// One block's rows, sorted by id as uint64. Counts first, so that the caller can allocate, then fills.
// `cut` null: the live store, by the thread that may write to the block, until the next write.
class BlockExport {
 public:
  BlockExport(RowStore& store, Cut* cut, uint32_t table, uint32_t block);
  int64_t num_rows() const { return static_cast<int64_t>(rows_.size()); }
  // Copy all rows to columns that hold num_rows() rows.
  void fill(const RowColumns& to);

 private:
  struct Row {
    uint64_t id;
    uint32_t slot;
  };
  void collect_rows(std::vector<uint32_t> slots, uint32_t block);

  const uint32_t table_;
  const uint32_t log2_blocks_;
  const Arena& arena_;
  std::unique_lock<std::mutex> lock_;
  std::unique_ptr<CutReader> reader_;
  std::vector<Row> rows_;
};

// Slots that may hold rows of a block at a cut (null: now), in the order of memory, each once. With the cut's mutex held.
std::vector<uint32_t> list_slots_of(RowStore& store, const Cut* cut, uint32_t table, const std::shared_ptr<IdMap>& map);

}  // namespace shoal
