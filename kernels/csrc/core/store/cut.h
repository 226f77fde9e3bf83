// Reading rows out: a frozen view of the store (PROTOCOLS C1), and export in the order of ids.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/store/rowstore.h"

namespace shoal {

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

 private:
  friend class BlockExport;
  RowStore& store_;
  std::shared_ptr<CutLayer> layer_;
  std::vector<std::vector<std::shared_ptr<IdMap>>> blocks_;
  std::mutex mutex_;  // Held by exports; release waits for it.
};

// One block's rows, sorted by id as uint64. Counts first, so that the caller can allocate, then fills.
// `cut` null: the live store, by the training thread, until the next write.
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
  // Copies one record to `scratch_` as it was at the cut; null if no row was there.
  const std::byte* read(uint32_t slot);
  const SavedHead* find_saved(uint32_t slot, bool* is_absent) const;
  void refresh_layers();
  void collect_rows(const std::shared_ptr<IdMap>& map, uint32_t block);

  RowStore& store_;
  Cut* cut_;
  const uint32_t table_;
  const Arena& arena_;
  std::unique_lock<std::mutex> lock_;
  std::vector<std::shared_ptr<CutLayer>> layers_;
  uint64_t layers_version_ = 0;
  std::vector<Row> rows_;
  std::unique_ptr<uint64_t[]> scratch_;
};

}  // namespace shoal
