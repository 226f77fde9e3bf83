// Steps, undo and the list of cut layers (PROTOCOLS C1, C2).
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/store/rowstore.h"

namespace shoal {

void RowStore::begin_step(uint32_t step) {
  if (step != 0 && step == step_) return;
  if (step == 0 || step < step_) {
    throw std::logic_error("steps count from 1 and grow: step " + std::to_string(step) + " after " +
                           std::to_string(step_));
  }
  if (undo_steps_ > 0 && logs_.size() == undo_steps_) {
    throw std::logic_error("step " + std::to_string(step) + ": " + std::to_string(undo_steps_) +
                           " earlier steps are neither committed nor undone");
  }
  collect();
  forget_reservations();
  step_ = step;
  if (undo_steps_ > 0) {
    if (spare_logs_.empty()) {
      logs_.push_back(std::make_unique<StepLog>(arenas_, num_threads_, &slabs_));
    } else {
      logs_.push_back(std::move(spare_logs_.back()));
      spare_logs_.pop_back();
    }
    logs_.back()->step = step;
    logs_.back()->serial = ++serial_;
  }
  set_guard();
}

void RowStore::commit(uint32_t step) {
  while (!logs_.empty() && logs_.front()->step <= step) {
    StepLog& log = *logs_.front();
    for (size_t arena = 0; arena < arenas_.size(); ++arena) {
      release_slots(static_cast<uint32_t>(arena), log.deleted[arena].data(), log.deleted[arena].size());
    }
    log.clear();
    spare_logs_.push_back(std::move(logs_.front()));
    logs_.pop_front();
  }
  collect();
  set_guard();
}

void RowStore::undo(uint32_t step) {
  if (logs_.empty() || logs_.back()->step != step) {
    throw std::logic_error("step " + std::to_string(step) + " cannot be undone: " +
                           (undo_steps_ == 0 ? "the store keeps no undo log"
                                             : "it is not the last uncommitted step"));
  }
  StepLog& log = *logs_.back();
  for (uint32_t arena = 0; arena < arenas_.size(); ++arena) restore_arena(log, arena);
  log.clear();
  spare_logs_.push_back(std::move(logs_.back()));
  logs_.pop_back();
  step_ = step - 1;
  set_guard();
}

// Put saved records back, with the id map and the counts. A cut opened after the step was applied keeps the values that
// are overwritten here. Rows that the step created become reservations again.
void RowStore::restore_arena(const StepLog& log, uint32_t arena_index) {
  Arena& arena = *arenas_[arena_index];
  std::vector<SavedHead> reinserted;
  log.arenas[arena_index]->for_each([&](const SavedHead& saved) {
    std::byte* record = arena.record(saved.slot);
    const RowHeader* before = header(saved.record());
    const uint32_t state = header(record)->state;
    const bool exists = (state & kExists) != 0, existed = (before->state & kExists) != 0;
    IdMap* map = block(saved.table, fmix64(static_cast<uint64_t>(before->id)));
    if (exists && !existed && !layers_.empty()) layers_.back()->note_deleted(map, saved.slot);
    if (!layers_.empty() && header(record)->stamp < cut_serial()) {
      layers_.back()->arenas[arena_index]->save(saved.table, saved.slot, record, exists, 0);
      std::atomic_thread_fence(std::memory_order_release);
    }
    std::memcpy(record, saved.record(), arena.layout.stride);
    map->num_rows.fetch_add(int64_t{existed} - int64_t{exists}, std::memory_order_relaxed);
    if (state == 0) reinserted.push_back(saved);
    if ((before->state & kReserved) != 0) {
      const std::lock_guard<std::mutex> lock(reservations_mutex_);
      reservations_.push_back({saved.table, saved.slot});
    }
  });
  for (const SavedHead& saved : reinserted) {
    const int64_t id = header(arena.record(saved.slot))->id;
    const uint64_t hash = fmix64(static_cast<uint64_t>(id));
    IdMap* map = block(saved.table, hash);
    const uint32_t other = map->find(id, hash);  // The id came back in the same step, as a row that is now undone.
    if (other != kNoSlot) {
      map->erase(id, hash);
      header(arena.record(other))->state = 0;
      release_slots(arena_index, &other, 1);
    }
    map->insert(hash, saved.slot);
  }
}

void RowStore::save(uint32_t table, uint32_t slot, std::byte* record, uint32_t thread) {
  RowHeader* head = header(record);
  const uint32_t arena = tables_[table].arena;
  if (head->stamp < undo_serial()) logs_.back()->arenas[arena]->append(table, slot, record, thread);
  if (head->stamp < cut_serial()) {
    const bool exists = (head->state & kExists) != 0;
    layers_.back()->arenas[arena]->save(table, slot, record, exists, thread);
  }
  // Readers that see any later write to the row also see what was saved (versions.h).
  std::atomic_thread_fence(std::memory_order_release);
  head->stamp = guard_;
}

// The same for the importer, whose rows are in no undo log.
void RowStore::save_copy(uint32_t table, IdMap* map, uint32_t slot, std::byte* record) {
  RowHeader* head = header(record);
  if (head->stamp >= cut_serial()) return;
  const bool exists = (head->state & kExists) != 0;
  layers_.back()->arenas[tables_[table].arena]->save(table, slot, record, exists, num_threads_);
  std::atomic_thread_fence(std::memory_order_release);
  head->stamp = map->layer_serial = cut_serial();
}

void RowStore::set_guard() { guard_ = std::max(undo_serial(), cut_serial()); }

std::shared_ptr<CutLayer> RowStore::open_layer(Blocks* blocks) {
  collect();
  auto layer = std::make_shared<CutLayer>(++serial_, arenas_, num_threads_ + 1, &slabs_);  // One for the importer.
  {
    const std::lock_guard<std::mutex> importer(mutex_);
    for (const TableState& state : states_) {
      blocks->push_back(state.blocks);
      for (const auto& map : state.blocks) {
        if (map != nullptr) map->cut_serial = layer->serial;
      }
    }
    const std::lock_guard<std::mutex> lock(layers_mutex_);
    layers_.push_back(layer);
    layers_version_.fetch_add(1, std::memory_order_release);
  }
  set_guard();
  return layer;
}

// Let go of released layers: the oldest is dropped, any other is folded into the next older one, whose values win.
void RowStore::collect() {
  const auto is_released = [](const auto& layer) { return layer->is_released.load(std::memory_order_acquire); };
  if (std::none_of(layers_.begin(), layers_.end(), is_released)) return;
  const std::lock_guard<std::mutex> importer(mutex_);
  std::vector<std::shared_ptr<CutLayer>> kept, dropped;
  for (const auto& layer : layers_) {
    if (is_released(layer) && kept.empty()) {
      dropped.push_back(layer);
      continue;
    }
    if (is_released(layer)) {
      // Where a reader lists the older one's rows the layer waits for another boundary.
      const std::unique_lock<std::mutex> entries(kept.back()->entries_mutex, std::try_to_lock);
      if (entries.owns_lock()) {
        kept.back()->absorb(*layer);
        continue;
      }
    }
    kept.push_back(layer);
  }
  for (const auto& layer : dropped) {
    for (size_t arena = 0; arena < arenas_.size(); ++arena) {
      arenas_[arena]->free(layer->retired()[arena].data(), layer->retired()[arena].size());
    }
  }
  {
    const std::lock_guard<std::mutex> lock(layers_mutex_);
    layers_.swap(kept);
    layers_version_.fetch_add(1, std::memory_order_release);
  }
  set_guard();
}

std::vector<std::shared_ptr<CutLayer>> RowStore::layers_since(const CutLayer& oldest, uint64_t* version) const {
  const std::lock_guard<std::mutex> lock(layers_mutex_);
  *version = layers_version_.load(std::memory_order_relaxed);
  std::vector<std::shared_ptr<CutLayer>> layers;
  for (const auto& layer : layers_) {
    if (layer->serial >= oldest.serial) layers.push_back(layer);
  }
  return layers;
}

uint64_t RowStore::version_bytes() const {
  uint64_t total = 0;
  for (const auto& log : logs_) total += log->bytes();
  const std::lock_guard<std::mutex> lock(layers_mutex_);
  for (const auto& layer : layers_) total += layer->bytes();
  return total;
}

}  // namespace shoal
