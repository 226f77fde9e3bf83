// The rows of one worker: all its tables, their blocks, the versions behind undo and cuts.
//
// A block is owned (trained on, in cuts, undone) or a replica: a copy of another worker's block, kept current by imports.
//
// Threads. One training thread owns the store: it resolves, updates, begins, commits and undoes steps, opens cuts and
// rolls back to them. Within a step it may let several threads work at once: `resolve` on different tables, and
// RowUpdaters (each with its own thread number < num_threads) on different rows. One other thread, the importer, may
// add, fill, change and drop replicas meanwhile; a replica that is being changed must not be promoted. Any thread may
// read an open cut (cut.h).
// No result and no exported order depends on slots.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "core/store/arena.h"
#include "core/store/checksum.h"
#include "core/store/id_map.h"
#include "core/store/optimizer.h"
#include "core/store/versions.h"

namespace shoal {

// Columns of exported or imported rows; null pointers are allowed for zero-width columns.
struct RowColumns {
  int64_t* ids = nullptr;
  std::byte* weights = nullptr;  // [n, dim] in the table's row type.
  float* slots = nullptr;        // [n, slot_width].
  int64_t* last_step = nullptr;
  int64_t* count = nullptr;
};

class RowStore {
 public:
  // `undo_steps`: how many uncommitted steps can be undone; 0 switches undo off, and its cost with it.
  RowStore(std::vector<TableDesc> tables, uint32_t num_threads, uint32_t undo_steps);
  ~RowStore();
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  uint32_t num_tables() const { return static_cast<uint32_t>(tables_.size()); }
  uint32_t num_threads() const { return num_threads_; }
  const TableDesc& table(uint32_t index) const { return tables_[index]; }
  Arena& arena_of(uint32_t table) { return *arenas_[tables_[table].arena]; }
  const Arena& arena_of(uint32_t table) const { return *arenas_[tables_[table].arena]; }
  const RowHasher& hasher_of(uint32_t table) const { return *hashers_[tables_[table].arena]; }

  // --- blocks -------------------------------------------------------------------------------------------------------
  // Any thread for the questions; the training thread (at a step boundary) for what touches an owned block.
  void add_block(uint32_t table, uint32_t block, bool is_replica);
  // Promote or demote a block, O(1) but for the reservations of a block that is demoted.
  void set_replica(uint32_t table, uint32_t block, bool is_replica);
  // Forget a block. Open cuts that it is part of still read it; its slots return when they are gone.
  void drop_block(uint32_t table, uint32_t block);
  bool owns(uint32_t table, uint32_t block) const;
  bool is_replica(uint32_t table, uint32_t block) const;
  // Rows of owned blocks, or of replicas.
  int64_t num_rows(uint32_t table, bool in_replicas) const;
  int64_t num_rows(uint32_t table, uint32_t block, bool in_replicas) const;

  // --- look-up ------------------------------------------------------------------------------------------------------
  // Slots of ids; kNoSlot where there is no row. With `reserve`, missing rows are made with their initial value and
  // marked reserved: they exist (are counted, exported, saved) once an update reaches them. Ids may repeat. Returns -1,
  // or the position of the first id whose block is not owned (then nothing has been reserved).
  int64_t resolve(uint32_t table, const int64_t* ids, int64_t n, uint32_t* slots, bool reserve);
  // Drop the reservations that no update has reached. Only while no caller holds slots from resolve(reserve=true)
  // that it still means to update.
  void discard_reservations();
  const std::byte* weights(uint32_t table, uint32_t slot) const { return arena_of(table).weights(slot); }
  // Rows as float32; absent rows give their initial value and are not created. Returns as resolve does.
  int64_t lookup(uint32_t table, const int64_t* ids, int64_t n, float* out);
  // Delete rows; returns how many there were.
  int64_t erase(uint32_t table, const int64_t* ids, int64_t n);

  // --- steps (C2) ---------------------------------------------------------------------------------------------------
  // Open a step, counted from 1 and growing; again for the same step it does nothing. Updates belong to the open step.
  void begin_step(uint32_t step);
  // All steps up to this one can no longer be undone.
  void commit(uint32_t step);
  // Restore every row to its state before `step`, which must be the last one begun.
  void undo(uint32_t step);
  uint32_t step() const { return step_; }

  // --- cuts (C1, C3) ------------------------------------------------------------------------------------------------
  using Blocks = std::vector<std::vector<std::shared_ptr<IdMap>>>;  // By table and block; null where not owned.
  // Open a layer, and list the blocks that it freezes.
  std::shared_ptr<CutLayer> open_layer(Blocks* blocks);
  // Make the blocks that were owned when `layer` was opened, and are, read as they did then; the step becomes `step`.
  // Younger cuts must be released (std::logic_error otherwise). The layer stays open.
  void roll_back(const CutLayer& layer, const Blocks& blocks, uint32_t step);
  // The layers from `oldest` on, for a reader; `version` changes whenever the list does.
  std::vector<std::shared_ptr<CutLayer>> layers_since(const CutLayer& oldest, uint64_t* version) const;
  uint64_t layers_version() const { return layers_version_.load(std::memory_order_relaxed); }
  uint64_t version_bytes() const;
  // The map of a block that is owned or a replica; null if neither.
  std::shared_ptr<IdMap> map_of(uint32_t table, uint32_t block) const;

  // --- import -------------------------------------------------------------------------------------------------------
  // Add rows, replacing rows of the same id, or with `replace` all rows of the block. All ids must be of `block`, which
  // must be held; throws std::invalid_argument otherwise, before anything changes.
  void import_rows(uint32_t table, uint32_t block, const RowColumns& rows, int64_t n, bool replace);
  // The same for packed records (packed.h); returns the change of the block's checksum (checksum.h). `expected`: rows
  // that will come, of which these are the first.
  uint64_t import_packed(uint32_t table, uint32_t block, const std::byte* packed, int64_t n, bool replace,
                         int64_t expected);
  // Add or replace packed records and delete the ids behind them; returns the change of the block's checksum.
  uint64_t apply_packed(uint32_t table, uint32_t block, const std::byte* packed, int64_t n, int64_t num_deleted);
  // Rows of a held block and the sum of their hashes. By the thread that may write to the block.
  std::pair<int64_t, uint64_t> block_checksum(uint32_t table, uint32_t block) const;

  uint64_t arena_bytes() const;
  uint64_t id_map_bytes() const;

  // --- for RowUpdater -----------------------------------------------------------------------------------------------
  // A slot whose stamp is below this must be saved before it is written; 0 when nothing keeps versions.
  uint32_t guard() const { return guard_; }
  void save(uint32_t table, uint32_t slot, std::byte* record, uint32_t thread);
  // Where `save` puts records of the table for cuts; null without an open cut.
  const ArenaLayer* newest_versions(uint32_t table) const {
    return layers_.empty() ? nullptr : layers_.back()->arenas[tables_[table].arena].get();
  }
  // Turn a reservation into a row.
  void create(const TableDesc& table, std::byte* record);

 private:
  struct TableState {
    std::vector<std::shared_ptr<IdMap>> blocks;    // Null where not owned. Changed by the training thread.
    std::vector<std::shared_ptr<IdMap>> replicas;  // Null where there is none. Under the mutex.
  };
  struct Reservation {
    uint32_t table;
    uint32_t slot;
  };

  IdMap* block(uint32_t table, uint64_t hash) const {
    return states_[table].blocks[block_of_hash(hash, tables_[table].log2_blocks)].get();
  }
  int64_t find_all(uint32_t table, const int64_t* ids, int64_t n, uint32_t* slots, std::vector<int64_t>* missing);
  void reserve_rows(uint32_t table, const int64_t* ids, const std::vector<int64_t>& missing, uint32_t* slots);
  void erase_row(uint32_t table, IdMap* map, int64_t id, uint64_t hash, uint32_t slot);
  void require_boundary(const char* what) const;
  std::shared_ptr<IdMap> require_block(uint32_t table, uint32_t block, bool* is_owned) const;
  template <typename Rows>
  void check_ids(uint32_t table, uint32_t block, const Rows& rows, int64_t n) const;
  template <typename Rows>
  uint64_t import_from(uint32_t table, uint32_t block, const Rows& rows, int64_t n, bool replace, int64_t expected);
  void discard_reservations(const IdMap* only);
  template <typename Rows>
  uint64_t upsert(uint32_t table, IdMap* map, bool is_owned, const Rows& rows, int64_t n);
  template <typename Rows>
  uint64_t upsert_chunk(uint32_t table, IdMap* map, bool is_owned, const Rows& rows, int64_t from, int64_t count);
  uint32_t find_chunk(const IdMap& map, const Arena& arena, const int64_t* ids, int64_t count, uint32_t* found) const;
  template <typename Ids>
  uint64_t erase_held(uint32_t table, IdMap* map, bool is_owned, const Ids& list, int64_t n);
  void erase_copy(uint32_t table, IdMap* map, int64_t id, uint64_t hash, uint32_t slot);
  // Of a replica: whether an open cut may show it, so that its rows must be saved before they change.
  bool is_in_open_cut(const IdMap& map) const {
    return !layers_.empty() && map.cut_serial >= layers_.front()->serial;
  }
  // Of a replica: whether an open layer may hold one of its slots, which then must not go to another row.
  bool is_in_open_layer(const IdMap& map) const {
    return !layers_.empty() && std::max(map.cut_serial, map.layer_serial) >= layers_.front()->serial;
  }
  void save_copy(uint32_t table, IdMap* map, uint32_t slot, std::byte* record);
  void release_slots(uint32_t arena, const uint32_t* slots, size_t count);
  void forget_reservations();
  void collect();
  void set_guard();
  void restore_arena(const StepLog& log, uint32_t arena);
  void roll_back_arena(uint32_t arena, size_t first_layer, const Blocks& blocks, std::vector<uint32_t>* retired);
  uint32_t undo_serial() const { return logs_.empty() ? 0 : logs_.back()->serial; }
  uint32_t cut_serial() const { return layers_.empty() ? 0 : layers_.back()->serial; }

  std::vector<TableDesc> tables_;
  std::vector<TableState> states_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<std::unique_ptr<const RowHasher>> hashers_;  // By arena.
  const uint32_t num_threads_;
  const uint32_t undo_steps_;

  // What the training thread shares with the importer: the lists of blocks, and the layers while rows of a replica that
  // an open cut still shows are saved to them. Held for a few hundred rows at a time.
  mutable std::mutex mutex_;

  std::mutex reservations_mutex_;
  std::vector<Reservation> reservations_;
  size_t reservations_checked_ = 0;

  SlabPool slabs_;
  uint32_t step_ = 0;
  uint32_t serial_ = 0;
  uint32_t guard_ = 0;
  std::deque<std::unique_ptr<StepLog>> logs_;  // Uncommitted steps, oldest first.
  std::vector<std::unique_ptr<StepLog>> spare_logs_;
  std::vector<std::shared_ptr<CutLayer>> layers_;  // Oldest first; changed by the training thread under both mutexes.
  mutable std::mutex layers_mutex_;
  std::atomic<uint64_t> layers_version_{0};
};

// Updates rows of one table in one step; one per thread. The row must have been resolved with reserve.
template <OptimizerKind KIND, RowType TYPE>
class RowUpdater {
 public:
  RowUpdater(RowStore& store, uint32_t table, const StepScalars& scalars, uint32_t thread)
      : store_(store),
        table_(store.table(table)),
        arena_(store.arena_of(table)),
        scalars_(scalars),
        thread_(thread),
        guard_(store.guard()),
        versions_(store.newest_versions(table)),
        scratch_(new float[2 * size_t{table_.dim}]) {}

  void prefetch(uint32_t slot) const {
    arena_.prefetch(slot);
    if (versions_ != nullptr) versions_->prefetch(slot);
  }

  // One update with the summed gradient of the row, dim floats. DIM > 0 fixes the width at compile time.
  template <uint32_t DIM = 0>
  void update(uint32_t slot, const float* gradient) {
    std::byte* record = arena_.record(slot);
    RowHeader* head = header(record);
    if (head->stamp < guard_) store_.save(table_.index, slot, record, thread_);
    if ((head->state & kExists) == 0) store_.create(table_, record);
    update_record<KIND, TYPE, DIM>(table_, arena_.layout, scalars_, record, gradient, scratch_.get());
    head->last_step = static_cast<int32_t>(scalars_.step);
    if ((head->state & kCountMask) != kCountMask) ++head->state;
  }

  // One row-wise update of a column block; `gradient` has had L2 decay, `mean_square` is the whole row's.
  void update_shared(uint32_t slot, const float* gradient, float mean_square) {
    std::byte* record = arena_.record(slot);
    RowHeader* head = header(record);
    if (head->stamp < guard_) store_.save(table_.index, slot, record, thread_);
    if ((head->state & kExists) == 0) store_.create(table_, record);
    update_record_rowwise<TYPE>(table_, arena_.layout, scalars_, record, gradient, mean_square, scratch_.get());
    head->last_step = static_cast<int32_t>(scalars_.step);
    if ((head->state & kCountMask) != kCountMask) ++head->state;
  }

 private:
  RowStore& store_;
  const TableDesc& table_;
  const Arena& arena_;
  const StepScalars scalars_;
  const uint32_t thread_, guard_;
  const ArenaLayer* versions_;
  std::unique_ptr<float[]> scratch_;
};

namespace detail {
template <OptimizerKind KIND, typename F>
void with_type(RowStore& store, uint32_t table, const StepScalars& scalars, uint32_t thread, F&& body) {
  switch (store.table(table).type) {
    case RowType::F32: return body(RowUpdater<KIND, RowType::F32>(store, table, scalars, thread));
    case RowType::F16: return body(RowUpdater<KIND, RowType::F16>(store, table, scalars, thread));
    case RowType::BF16: return body(RowUpdater<KIND, RowType::BF16>(store, table, scalars, thread));
  }
}
}  // namespace detail

// Call `body(updater)`, a lambda that takes `auto&&`, with the RowUpdater of the table's optimizer and row type. The
// step must be open.
template <typename F>
void with_updater(RowStore& store, uint32_t table, const StepScalars& scalars, uint32_t thread, F&& body) {
  switch (store.table(table).optimizer) {
    case OptimizerKind::SGD: return detail::with_type<OptimizerKind::SGD>(store, table, scalars, thread, body);
    case OptimizerKind::ADAGRAD: return detail::with_type<OptimizerKind::ADAGRAD>(store, table, scalars, thread, body);
    case OptimizerKind::ROWWISE_ADAGRAD:
      return detail::with_type<OptimizerKind::ROWWISE_ADAGRAD>(store, table, scalars, thread, body);
    case OptimizerKind::ADAM: return detail::with_type<OptimizerKind::ADAM>(store, table, scalars, thread, body);
  }
}

}  // namespace shoal
