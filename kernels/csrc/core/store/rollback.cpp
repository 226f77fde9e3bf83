// Rolling back to a cut: every row that changed since it is what its layers say it was.
#include <algorithm>
#include <stdexcept>

#include "core/store/rowstore.h"

namespace shoal {

void RowStore::roll_back(const CutLayer& layer, const Blocks& blocks, uint32_t step) {
  collect();
  const auto found = std::find_if(layers_.begin(), layers_.end(), [&](const auto& l) { return l.get() == &layer; });
  if (found == layers_.end()) throw std::logic_error("the cut is not one of this store's open cuts");
  for (auto younger = found + 1; younger != layers_.end(); ++younger) {
    if (!(*younger)->is_released.load(std::memory_order_acquire)) {
      throw std::logic_error("a younger cut is open: release it before rolling back past it");
    }
  }
  discard_reservations();
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t first_layer = static_cast<size_t>(found - layers_.begin());
  for (uint32_t arena = 0; arena < arenas_.size(); ++arena) {
    // Slots that are out of use but for readers; those of rows that come back are taken out again.
    std::vector<uint32_t> retired;
    for (const auto& log : logs_) retired.insert(retired.end(), log->deleted[arena].begin(), log->deleted[arena].end());
    for (size_t i = first_layer; i < layers_.size(); ++i) {
      std::vector<uint32_t>& slots = layers_[i]->retired()[arena];
      retired.insert(retired.end(), slots.begin(), slots.end());
      slots.clear();
    }
    roll_back_arena(arena, first_layer, blocks, &retired);
    layers_[first_layer]->retire(arena, retired.data(), retired.size());
  }
  for (auto& log : logs_) {
    log->clear();
    spare_logs_.push_back(std::move(log));
  }
  logs_.clear();
  step_ = step;
  set_guard();
}

// The oldest layer that has a slot says what was there at the cut. What was not there goes first, so that an id is free
// when the row that had it returns. The layers keep what they hold: it is true of the cut still, as are the stamps, so
// the next write saves nothing twice and the cut can be rolled back to again.
void RowStore::roll_back_arena(uint32_t arena_index, size_t first_layer, const Blocks& blocks,
                               std::vector<uint32_t>* retired) {
  Arena& arena = *arenas_[arena_index];
  std::vector<const SavedHead*> absents, rows;
  for (size_t i = first_layer; i < layers_.size(); ++i) {
    const auto is_older = [&](uint32_t slot) {
      return std::any_of(layers_.begin() + first_layer, layers_.begin() + i,
                         [&](const auto& l) { return l->arenas[arena_index]->find(slot) != ArenaLayer::kNone; });
    };
    const auto add_to = [&](std::vector<const SavedHead*>* list) {
      return [&, list](const SavedHead& head) {
        const uint32_t block = row_block(head.id(), tables_[head.table].log2_blocks);
        const auto& map = states_[head.table].blocks[block];
        const bool is_ours = map != nullptr && map == blocks[head.table][block];
        if (is_ours && !is_older(head.slot)) list->push_back(&head);
      };
    };
    layers_[i]->arenas[arena_index]->absents().for_each(add_to(&absents));
    layers_[i]->arenas[arena_index]->records().for_each(add_to(&rows));
  }
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < absents.size(); ++i) {
    if (i + kAhead < absents.size()) arena.prefetch_header(absents[i + kAhead]->slot);
    RowHeader* head = header(arena.record(absents[i]->slot));
    if ((head->state & kExists) == 0) continue;
    const uint64_t hash = fmix64(static_cast<uint64_t>(head->id));
    IdMap* map = block(absents[i]->table, hash);
    map->erase(head->id, hash);
    map->num_rows.fetch_sub(1, std::memory_order_relaxed);
    head->state = 0;
    retired->push_back(absents[i]->slot);
  }
  std::vector<uint32_t> revived;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size()) arena.prefetch(rows[i + kAhead]->slot);
    std::byte* record = arena.record(rows[i]->slot);
    const bool exists = (header(record)->state & kExists) != 0;
    const uint32_t stamp = header(record)->stamp;
    std::memcpy(record, rows[i]->record(), arena.layout.stride);
    header(record)->stamp = stamp;
    if (exists) continue;
    const uint64_t hash = fmix64(static_cast<uint64_t>(rows[i]->id()));
    IdMap* map = block(rows[i]->table, hash);
    map->insert(hash, rows[i]->slot);
    map->num_rows.fetch_add(1, std::memory_order_relaxed);
    revived.push_back(rows[i]->slot);
  }
  if (revived.empty()) return;
  std::sort(revived.begin(), revived.end());
  const auto is_revived = [&](uint32_t slot) { return std::binary_search(revived.begin(), revived.end(), slot); };
  retired->erase(std::remove_if(retired->begin(), retired->end(), is_revived), retired->end());
}

}  // namespace shoal
