// Which blocks a worker holds: as their owner, or as a copy of another worker's.
#include <stdexcept>

#include "core/store/rowstore.h"

namespace shoal {

namespace {
std::string name_of(const TableDesc& table, uint32_t block) {
  return "table '" + table.name + "': block " + std::to_string(block);
}
}  // namespace

void RowStore::add_block(uint32_t table, uint32_t block, bool is_replica) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TableState& state = states_.at(table);
  auto& place = (is_replica ? state.replicas : state.blocks).at(block);
  if ((is_replica ? state.blocks : state.replicas)[block] != nullptr) {
    throw std::invalid_argument(name_of(tables_[table], block) + (is_replica ? " is owned" : " is a replica") +
                                " already");
  }
  if (place == nullptr) place = std::make_shared<IdMap>(&arena_of(table), tables_[table].log2_blocks);
}

void RowStore::set_replica(uint32_t table, uint32_t block, bool is_replica) {
  require_boundary("promoting or demoting a block");
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TableState& state = states_.at(table);
    auto& from = (is_replica ? state.blocks : state.replicas).at(block);
    auto& to = (is_replica ? state.replicas : state.blocks)[block];
    if (from == nullptr && to == nullptr) throw std::invalid_argument(name_of(tables_[table], block) + " is not held");
    if (from == nullptr) return;
    if (is_replica) {
      // The importer must not meet reservations, which the training thread discards.
      discard_reservations(from.get());
      from->layer_serial = serial_;
    }
    to = std::move(from);
    from.reset();
  }
}

// The records stay as they are: cuts that list the map read them where they lie.
void RowStore::drop_block(uint32_t table, uint32_t block) {
  std::shared_ptr<IdMap> map;
  bool is_owned;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TableState& state = states_.at(table);
    is_owned = state.blocks.at(block) != nullptr;
    if (is_owned) {
      require_boundary("dropping a block");
      discard_reservations(state.blocks[block].get());
    }
    map = std::move(is_owned ? state.blocks[block] : state.replicas[block]);
  }
  if (map == nullptr) return;
  const std::vector<uint32_t> slots = map->list_slots();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_owned || is_in_open_layer(*map)) {
    release_slots(tables_[table].arena, slots.data(), slots.size());
  } else {
    arena_of(table).free(slots.data(), slots.size());
  }
}

bool RowStore::owns(uint32_t table, uint32_t block) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return states_.at(table).blocks.at(block) != nullptr;
}

bool RowStore::is_replica(uint32_t table, uint32_t block) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return states_.at(table).replicas.at(block) != nullptr;
}

std::shared_ptr<IdMap> RowStore::map_of(uint32_t table, uint32_t block) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const TableState& state = states_.at(table);
  return state.blocks.at(block) != nullptr ? state.blocks[block] : state.replicas[block];
}

std::shared_ptr<IdMap> RowStore::require_block(uint32_t table, uint32_t block, bool* is_owned) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const TableState& state = states_.at(table);
  *is_owned = state.blocks.at(block) != nullptr;
  const auto& map = *is_owned ? state.blocks[block] : state.replicas[block];
  if (map == nullptr) throw std::invalid_argument(name_of(tables_[table], block) + " is not held");
  return map;
}

int64_t RowStore::num_rows(uint32_t table, uint32_t block, bool in_replicas) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const TableState& state = states_.at(table);
  const auto& map = (in_replicas ? state.replicas : state.blocks).at(block);
  return map == nullptr ? 0 : map->num_rows.load(std::memory_order_relaxed);
}

int64_t RowStore::num_rows(uint32_t table, bool in_replicas) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const TableState& state = states_.at(table);
  int64_t total = 0;
  for (const auto& map : in_replicas ? state.replicas : state.blocks) {
    if (map != nullptr) total += map->num_rows.load(std::memory_order_relaxed);
  }
  return total;
}

uint64_t RowStore::id_map_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t total = 0;
  for (const auto& state : states_) {
    for (const auto& map : state.blocks) total += map == nullptr ? 0 : map->bytes();
    for (const auto& map : state.replicas) total += map == nullptr ? 0 : map->bytes();
  }
  return total;
}

// Slots whose rows are gone: free, unless an open cut may still read them.
void RowStore::release_slots(uint32_t arena, const uint32_t* slots, size_t count) {
  if (layers_.empty()) {
    arenas_[arena]->free(slots, count);
  } else {
    layers_.back()->retire(arena, slots, count);
  }
}

}  // namespace shoal
