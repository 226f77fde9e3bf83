#include "core/store/packed.h"

#include <algorithm>
#include <stdexcept>

#include "core/store/radix_sort.h"

namespace shoal {

namespace {

// Records looked at ahead of the one being packed.
constexpr size_t kAhead = 12;

// Whether two records hold the same row; the stamp is no part of it.
bool is_same_row(const PackedLayout& layout, const std::byte* a, const std::byte* b) {
  const RowHeader *x = header(a), *y = header(b);
  return x->last_step == y->last_step && ((x->state ^ y->state) & kCountMask) == 0 &&
         std::memcmp(a + kHeaderBytes, b + kHeaderBytes, layout.payload_bytes) == 0;
}

[[noreturn]] void throw_too_small(size_t capacity) {
  throw std::invalid_argument("a buffer of " + std::to_string(capacity) + " bytes does not hold one row");
}

}  // namespace

bool SectionWriter::open(const SectionHead& head, size_t item_bytes) {
  if (!has_room(sizeof(SectionHead) + item_bytes)) return false;
  opened_ = used_;
  std::memcpy(take(sizeof(SectionHead)), &head, sizeof(SectionHead));
  return true;
}

void SectionWriter::close(bool is_needed) {
  if (!is_needed && head().num_rows == 0 && head().num_deleted == 0) {
    used_ = opened_;
    return;
  }
  ++num_sections_;
  for (; used_ % 8 != 0 && used_ < capacity_; ++used_) to_[used_] = std::byte{0};
}

ChangePack::ChangePack(Cut& cut, Cut& since, std::vector<Key> keys, int64_t origin)
    : cut_(cut), since_(since), keys_(std::move(keys)), origin_(origin), deltas_(keys_.size(), 0) {
  if (&cut == &since) throw std::invalid_argument("changes are those since an older cut of the same store");
  const std::scoped_lock lock(cut.mutex_, since.mutex_);
  cut.require_older(since);
  RowStore& store = cut.store_;
  std::vector<size_t> first_block(cut.blocks_.size() + 1, 0);
  for (size_t table = 0; table < cut.blocks_.size(); ++table) {
    first_block[table + 1] = first_block[table] + cut.blocks_[table].size();
  }
  for (const auto& [table, block] : keys_) {
    const IdMap* map = cut.blocks_.at(table).at(block).get();
    if (map == nullptr || map != since.blocks_[table][block].get()) {
      throw std::invalid_argument("table '" + store.table(table).name + "': block " + std::to_string(block) +
                                  (map == nullptr ? " is not owned" : " was not owned at the older cut"));
    }
  }
  index_ = cut.changes_since(since);
  for (const auto& [table, block] : keys_) {
    const size_t place = first_block[table] + block;
    ranges_.emplace_back(index_->starts[place], index_->starts[place + 1]);
  }
}

size_t ChangePack::bytes_max() const {
  size_t total = 0;
  for (size_t i = 0; i < keys_.size(); ++i) {
    const size_t row_bytes = PackedLayout(cut_.store_.arena_of(keys_[i].first).layout).stride;
    total += sizeof(SectionHead) + 8 + (ranges_[i].second - ranges_[i].first) * (row_bytes + 8);
  }
  return total;
}

size_t ChangePack::fill(std::byte* to, size_t capacity) {
  const std::scoped_lock lock(cut_.mutex_, since_.mutex_);
  cut_.require_older(since_);
  SectionWriter writer(to, capacity);
  while (!is_done() && fill_key(&writer)) {
    ++at_key_;
    at_change_ = at_deleted_ = 0;
    deleted_.clear();
    is_deleted_known_ = false;
  }
  num_sections_ = writer.num_sections();
  if (!is_done() && writer.used() == 0) throw_too_small(capacity);
  return writer.used();
}

// Returns whether everything of the key has been written.
bool ChangePack::fill_key(SectionWriter* writer) {
  const auto [table, block] = keys_[at_key_];
  const auto [from, to] = ranges_[at_key_];
  if (from == to) return true;
  const size_t item_bytes = std::max<size_t>(8, PackedLayout(cut_.store_.arena_of(table).layout).stride);
  if (!writer->open({table, block, 0, 0, origin_, 0, 0, 0}, item_bytes)) return false;
  CutReader reader(cut_.store_, &cut_, table);
  const Change* changes = index_->changes.data() + from;
  const bool is_done =
      pack_rows(writer, &reader, changes, to - from) && pack_deleted(writer, &reader, changes, to - from);
  num_changes_ += writer->head().num_rows + writer->head().num_deleted;
  writer->close();
  return is_done;
}

bool ChangePack::pack_rows(SectionWriter* writer, CutReader* reader, const Change* changes, size_t count) {
  const uint32_t table = keys_[at_key_].first;
  const Arena& arena = cut_.store_.arena_of(table);
  const RowHasher& hasher = cut_.store_.hasher_of(table);
  const PackedLayout layout(arena.layout);
  uint64_t delta = 0;
  int64_t num_rows = 0;
  size_t ahead = at_change_;
  for (; at_change_ < count && writer->has_room(layout.stride); ++at_change_) {
    for (; ahead < std::min(at_change_ + kAhead, count); ++ahead) {
      reader->prefetch(changes[ahead].slot);
      if (changes[ahead].existed) prefetch_range(changes[ahead].head->record(), arena.layout.stride);
    }
    const Change& change = changes[at_change_];
    const std::byte* before = change.existed ? change.head->record() : nullptr;
    const std::byte* now = reader->read(change.slot);
    if (before != nullptr && now != nullptr && is_same_row(layout, before, now)) continue;
    if (before != nullptr) delta -= hasher.hash(before);
    if (now != nullptr) {
      delta += hasher.hash(now);
      layout.pack(now, writer->take(layout.stride));
      ++num_rows;
    } else if (before != nullptr) {
      deleted_.push_back(change.head->id());
    }
  }
  deltas_[at_key_] += delta;
  writer->head().num_rows += num_rows;
  return at_change_ == count;
}

// A row that was deleted in one slot and made again in another is no deletion: it has been written as a row.
bool ChangePack::pack_deleted(SectionWriter* writer, CutReader* reader, const Change* changes, size_t count) {
  if (!is_deleted_known_ && !deleted_.empty()) {
    std::sort(deleted_.begin(), deleted_.end());
    std::vector<int64_t> made;
    for (const Change* change = changes; change != changes + count; ++change) {
      if (change->existed || !std::binary_search(deleted_.begin(), deleted_.end(), change->head->id())) continue;
      if (reader->read(change->slot) != nullptr) made.push_back(change->head->id());
    }
    std::sort(made.begin(), made.end());
    const auto is_made = [&](int64_t id) { return std::binary_search(made.begin(), made.end(), id); };
    deleted_.erase(std::remove_if(deleted_.begin(), deleted_.end(), is_made), deleted_.end());
  }
  is_deleted_known_ = true;
  for (; at_deleted_ < deleted_.size(); ++at_deleted_) {
    if (!writer->has_room(8)) return false;
    std::memcpy(writer->take(8), &deleted_[at_deleted_], 8);
    ++writer->head().num_deleted;
  }
  return true;
}

BlockPack::BlockPack(RowStore& store, Cut* cut, uint32_t table, uint32_t block)
    : store_(store), cut_(cut), table_(table), block_(block) {
  std::unique_lock<std::mutex> lock;
  std::shared_ptr<IdMap> map;
  if (cut != nullptr) {
    lock = std::unique_lock<std::mutex>(cut->mutex_);
    cut->require_open();
    map = cut->blocks_.at(table).at(block);
  } else {
    map = store.map_of(table, block);
  }
  if (map == nullptr) {
    throw std::invalid_argument("table '" + store.table(table).name + "': block " + std::to_string(block) +
                                " is not owned");
  }
  slots_ = list_slots_of(store, cut, table, map);
}

size_t BlockPack::fill(std::byte* to, size_t capacity) {
  std::unique_lock<std::mutex> lock;
  if (cut_ != nullptr) {
    lock = std::unique_lock<std::mutex>(cut_->mutex_);
    cut_->require_open();
  }
  const Arena& arena = store_.arena_of(table_);
  const RowHasher& hasher = store_.hasher_of(table_);
  const PackedLayout layout(arena.layout);
  const uint32_t log2_blocks = store_.table(table_).log2_blocks;
  SectionWriter writer(to, capacity);
  if (!writer.open({table_, block_, 0, 0, num_rows_, static_cast<int64_t>(slots_.size()), 0, 0}, layout.stride)) {
    return 0;
  }
  CutReader reader(store_, cut_, table_);
  for (; at_ < slots_.size() && writer.has_room(layout.stride); ++at_) {
    if (at_ + kAhead < slots_.size()) reader.prefetch(slots_[at_ + kAhead]);
    const std::byte* record = reader.read(slots_[at_]);
    if (record == nullptr || row_block(header(record)->id, log2_blocks) != block_) continue;
    checksum_ += hasher.hash(record);
    layout.pack(record, writer.take(layout.stride));
    ++writer.head().num_rows;
    ++num_rows_;
  }
  is_done_ = at_ == slots_.size();
  if (is_done_) {
    writer.head().total = num_rows_;
    writer.head().checksum = checksum_;
    writer.head().is_last = 1;
  }
  writer.close(true);
  return writer.used();
}

}  // namespace shoal
