#include "core/store/cut.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace shoal {

namespace {

// Copy a record that a writer may be changing. Word-sized relaxed loads make the race defined behaviour on this side;
// what they read is used only if no version was published meanwhile.
void copy_racing(const std::byte* from, uint64_t* to, uint32_t bytes) {
  const uint64_t* words = reinterpret_cast<const uint64_t*>(from);
  for (uint32_t i = 0; i < bytes / 8; ++i) to[i] = __atomic_load_n(words + i, __ATOMIC_RELAXED);
}

constexpr uint32_t kDigitBits = 8;
constexpr size_t kDigits = size_t{1} << kDigitBits;
constexpr size_t kRadixSizeMin = 256;  // Smaller ranges: comparisons are faster.

// Stable scatter of items by one digit; `ends` receives the end of each digit's range.
template <typename T, typename Key>
void scatter(const T* from, size_t count, T* to, uint32_t shift, Key key, std::array<size_t, kDigits>* ends) {
  std::array<size_t, kDigits>& at = *ends;
  at.fill(0);
  for (size_t i = 0; i < count; ++i) ++at[(key(from[i]) >> shift) % kDigits];
  size_t total = 0;
  for (size_t& start : at) {
    const size_t size = start;
    start = total;
    total += size;
  }
  for (size_t i = 0; i < count; ++i) to[at[(key(from[i]) >> shift) % kDigits]++] = from[i];
}

// Sort `items` by the key's bits below `high`, from the highest digit down: after one or two scatters the ranges fit the
// cache and are soon small enough for comparisons. `spare` has the same size.
template <typename T, typename Key>
void radix_sort(T* items, T* spare, size_t count, uint32_t high, Key key) {
  if (count < kRadixSizeMin || high == 0) {
    std::sort(items, items + count, [&](const T& a, const T& b) { return key(a) < key(b); });
    return;
  }
  const uint32_t shift = high > kDigitBits ? high - kDigitBits : 0;
  std::array<size_t, kDigits> ends;
  scatter(items, count, spare, shift, key, &ends);
  std::memcpy(static_cast<void*>(items), spare, count * sizeof(T));
  size_t from = 0;
  for (const size_t to : ends) {
    if (to - from > 1) radix_sort(items + from, spare + from, to - from, shift, key);
    from = to;
  }
}

template <typename T, typename Key>
void radix_sort(std::vector<T>* items, Key key) {
  if (items->empty()) return;
  uint64_t varying = 0;
  for (const T& item : *items) varying |= key(item) ^ key(items->front());
  std::vector<T> spare(items->size());
  const uint32_t high = varying == 0 ? 0 : 64 - __builtin_clzll(varying);
  radix_sort(items->data(), spare.data(), items->size(), high, key);
}

}  // namespace

Cut::Cut(RowStore& store) : store_(store), layer_(store.open_layer()) {
  for (uint32_t table = 0; table < store.num_tables(); ++table) blocks_.push_back(store.blocks_of(table));
}

void Cut::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (layer_ == nullptr) return;
  layer_->is_released.store(true, std::memory_order_release);
  layer_.reset();
  blocks_.clear();
}

BlockExport::BlockExport(RowStore& store, Cut* cut, uint32_t table, uint32_t block)
    : store_(store),
      cut_(cut),
      table_(table),
      arena_(store.arena_of(table)),
      scratch_(new uint64_t[arena_.layout.stride / 8]) {
  std::shared_ptr<IdMap> map;
  if (cut_ != nullptr) {
    lock_ = std::unique_lock<std::mutex>(cut_->mutex_);
    if (cut_->layer_ == nullptr) throw std::logic_error("the cut has been released");
    map = cut_->blocks_.at(table).at(block);
    refresh_layers();
  } else {
    map = store.blocks_of(table).at(block);
  }
  if (map == nullptr) {
    throw std::invalid_argument("table '" + store.table(table).name + "': block " + std::to_string(block) +
                                " is not owned");
  }
  collect_rows(map, block);
}

void BlockExport::refresh_layers() { layers_ = store_.layers_since(*cut_->layer_, &layers_version_); }

const SavedHead* BlockExport::find_saved(uint32_t slot, bool* is_absent) const {
  const uint32_t arena = store_.table(table_).arena;
  *is_absent = false;
  for (const auto& layer : layers_) {
    const uint32_t code = layer->arenas[arena]->find(slot);
    if (code == ArenaLayer::kNone) continue;
    *is_absent = code == ArenaLayer::kAbsent;
    return *is_absent ? nullptr : layer->arenas[arena]->saved(code);
  }
  return nullptr;
}

const std::byte* BlockExport::read(uint32_t slot) {
  const std::byte* copy = reinterpret_cast<const std::byte*>(scratch_.get());
  if (cut_ == nullptr) {
    const std::byte* record = arena_.record(slot);
    return (header(record)->state & kExists) != 0 ? record : nullptr;
  }
  for (bool is_copied = false;;) {
    bool is_absent;
    const SavedHead* saved = find_saved(slot, &is_absent);
    if (is_absent || (saved != nullptr && saved->table != table_)) return nullptr;
    if (saved != nullptr) return saved->record();
    if (is_copied) return (header(copy)->state & kExists) != 0 ? copy : nullptr;
    copy_racing(arena_.record(slot), scratch_.get(), arena_.layout.stride);
    std::atomic_thread_fence(std::memory_order_acquire);
    is_copied = store_.layers_version() == layers_version_;
    if (!is_copied) refresh_layers();
  }
}

// Records are read in the order of slots, that is of memory: the map's order would miss the cache and the TLB each time.
// The map is listed before the layers' deleted slots, in the opposite order of a deletion, so no row slips through;
// one that is seen twice is dropped after sorting.
void BlockExport::collect_rows(const std::shared_ptr<IdMap>& map, uint32_t block) {
  std::vector<uint32_t> slots = map->list_slots();
  if (cut_ != nullptr) {
    refresh_layers();
    for (const auto& layer : layers_) {
      const std::vector<uint32_t> deleted = layer->deleted(table_);
      slots.insert(slots.end(), deleted.begin(), deleted.end());
    }
  }
  radix_sort(&slots, [](uint32_t slot) { return uint64_t{slot}; });
  constexpr size_t kAhead = 16;
  const uint32_t log2_blocks = store_.table(table_).log2_blocks;
  rows_.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i + kAhead < slots.size()) arena_.prefetch_header(slots[i + kAhead]);
    const std::byte* record = read(slots[i]);
    if (record == nullptr || row_block(header(record)->id, log2_blocks) != block) continue;
    rows_.push_back({static_cast<uint64_t>(header(record)->id), slots[i]});
  }
  radix_sort(&rows_, [](const Row& row) { return row.id; });
  const auto is_same = [](const Row& a, const Row& b) { return a.id == b.id; };
  rows_.erase(std::unique(rows_.begin(), rows_.end(), is_same), rows_.end());
}

void BlockExport::fill(const RowColumns& to) {
  constexpr size_t kAhead = 8;
  const RecordLayout& layout = arena_.layout;
  const size_t weight_bytes = layout.dim * row_type_bytes(layout.type), slot_bytes = size_t{layout.slot_width} * 4;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (i + kAhead < rows_.size()) arena_.prefetch(rows_[i + kAhead].slot);
    const std::byte* record = read(rows_[i].slot);
    if (record == nullptr) throw std::logic_error("a row vanished between counting and copying");
    const RowHeader* head = header(record);
    to.ids[i] = head->id;
    to.last_step[i] = head->last_step;
    to.count[i] = head->state & kCountMask;
    if (slot_bytes != 0) std::memcpy(to.slots + i * layout.slot_width, slots(record), slot_bytes);
    std::memcpy(to.weights + i * weight_bytes, record + layout.weights_offset, weight_bytes);
  }
}

}  // namespace shoal
