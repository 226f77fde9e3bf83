#include "core/store/cut.h"

#include <algorithm>
#include <stdexcept>

#include "core/store/copy_row.h"
#include "core/store/radix_sort.h"

namespace shoal {

namespace {

// Copy a record that a writer may be changing. Word-sized relaxed loads make the race defined behaviour on this side;
// what they read is used only if no version was published meanwhile.
void copy_racing(const std::byte* from, uint64_t* to, uint32_t bytes) {
  const uint64_t* words = reinterpret_cast<const uint64_t*>(from);
  for (uint32_t i = 0; i < bytes / 8; ++i) to[i] = __atomic_load_n(words + i, __ATOMIC_RELAXED);
}

}  // namespace

Cut::Cut(RowStore& store) : store_(store), layer_(store.open_layer(&blocks_)) {}

void Cut::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (layer_ == nullptr) return;
  layer_->is_released.store(true, std::memory_order_release);
  layer_.reset();
  blocks_.clear();
  index_.reset();
}

void Cut::require_open() const {
  if (layer_ == nullptr) throw std::logic_error("the cut has been released");
}

// The copies are taken under the lock, the work is done without it: another thread's export may be under way.
void Cut::roll_back(uint32_t step) {
  std::unique_lock<std::mutex> lock(mutex_);
  require_open();
  const std::shared_ptr<CutLayer> layer = layer_;
  const RowStore::Blocks blocks = blocks_;
  lock.unlock();
  store_.roll_back(*layer, blocks, step);
}

CutReader::CutReader(RowStore& store, const Cut* cut, uint32_t table)
    : store_(store),
      cut_(cut),
      arena_index_(store.table(table).arena),
      arena_(store.arena_of(table)),
      scratch_(new uint64_t[arena_.layout.stride / 8]) {
  if (cut_ != nullptr) refresh_layers();
}

void CutReader::refresh_layers() { layers_ = store_.layers_since(*cut_->layer_, &layers_version_); }

const SavedHead* CutReader::find_saved(uint32_t slot, bool* is_absent) const {
  *is_absent = false;
  for (const auto& layer : layers_) {
    const ArenaLayer& saved = *layer->arenas[arena_index_];
    const uint32_t code = saved.find(slot);
    if (code == ArenaLayer::kNone) continue;
    *is_absent = code == ArenaLayer::kAbsent;
    return *is_absent ? nullptr : saved.saved(code);
  }
  return nullptr;
}

void CutReader::prefetch(uint32_t slot) const {
  arena_.prefetch(slot);
  for (const auto& layer : layers_) layer->arenas[arena_index_]->prefetch(slot);
}

const std::byte* CutReader::read(uint32_t slot) {
  const std::byte* copy = reinterpret_cast<const std::byte*>(scratch_.get());
  if (cut_ == nullptr) {
    const std::byte* record = arena_.record(slot);
    return (header(record)->state & kExists) != 0 ? record : nullptr;
  }
  for (bool is_copied = false;;) {
    bool is_absent;
    const SavedHead* saved = find_saved(slot, &is_absent);
    if (is_absent) return nullptr;
    if (saved != nullptr) return saved->record();
    if (is_copied) return (header(copy)->state & kExists) != 0 ? copy : nullptr;
    copy_racing(arena_.record(slot), scratch_.get(), arena_.layout.stride);
    std::atomic_thread_fence(std::memory_order_acquire);
    is_copied = store_.layers_version() == layers_version_;
    if (!is_copied) refresh_layers();
  }
}

std::vector<uint32_t> CutReader::deleted(const IdMap* map) {
  std::vector<uint32_t> slots;
  if (cut_ == nullptr) return slots;
  refresh_layers();
  for (const auto& layer : layers_) {
    const std::vector<uint32_t> more = layer->deleted(map);
    slots.insert(slots.end(), more.begin(), more.end());
  }
  return slots;
}

BlockExport::BlockExport(RowStore& store, Cut* cut, uint32_t table, uint32_t block)
    : table_(table), log2_blocks_(store.table(table).log2_blocks), arena_(store.arena_of(table)) {
  std::shared_ptr<IdMap> map;
  if (cut != nullptr) {
    lock_ = std::unique_lock<std::mutex>(cut->mutex_);
    cut->require_open();
    map = cut->blocks_.at(table).at(block);
  } else {
    map = store.map_of(table, block);
  }
  if (map == nullptr) {
    throw std::invalid_argument("table '" + store.table(table).name + "': block " + std::to_string(block) +
                                " is not owned");
  }
  reader_ = std::make_unique<CutReader>(store, cut, table);
  collect_rows(list_slots_of(store, cut, table, map), block);
}

// The map is listed before the layers' deleted slots, in the opposite order of a deletion, so no row slips through.
std::vector<uint32_t> list_slots_of(RowStore& store, const Cut* cut, uint32_t table, const std::shared_ptr<IdMap>& map) {
  std::vector<uint32_t> slots = map->list_slots();
  const std::vector<uint32_t> deleted = CutReader(store, cut, table).deleted(map.get());
  slots.insert(slots.end(), deleted.begin(), deleted.end());
  radix_sort(&slots, [](uint32_t slot) { return uint64_t{slot}; });
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  return slots;
}

// Records are read in the order of slots, that is of memory: the map's order would miss the cache and the TLB each time.
void BlockExport::collect_rows(std::vector<uint32_t> slots, uint32_t block) {
  constexpr size_t kAhead = 16;
  rows_.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i + kAhead < slots.size()) arena_.prefetch_header(slots[i + kAhead]);
    const std::byte* record = reader_->read(slots[i]);
    if (record == nullptr || row_block(header(record)->id, log2_blocks_) != block) continue;
    rows_.push_back({static_cast<uint64_t>(header(record)->id), slots[i]});
  }
  radix_sort(&rows_, [](const Row& row) { return row.id; });
}

void BlockExport::fill(const RowColumns& to) {
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (i + kAhead < rows_.size()) reader_->prefetch(rows_[i + kAhead].slot);
    const std::byte* record = reader_->read(rows_[i].slot);
    if (record == nullptr) throw std::logic_error("a row vanished between counting and copying");
    copy_row(arena_.layout, record, i, to);
  }
}

}  // namespace shoal
