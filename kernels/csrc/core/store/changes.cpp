// What changed between two cuts. The layers from the older cut up to the younger one name every row that may differ.
#include <algorithm>
#include <stdexcept>

#include "core/store/cut.h"
#include "core/store/cut_rows.h"
#include "core/store/radix_sort.h"

namespace shoal {

namespace {

// Whether two records hold the same row; the stamp is no part of it.
bool is_same_row(const RecordLayout& layout, const std::byte* a, const std::byte* b) {
  const RowHeader *x = header(a), *y = header(b);
  const size_t payload_bytes = layout.weights_offset - kHeaderBytes + layout.dim * row_type_bytes(layout.type);
  return x->last_step == y->last_step && ((x->state ^ y->state) & kCountMask) == 0 &&
         std::memcmp(a + kHeaderBytes, b + kHeaderBytes, payload_bytes) == 0;
}

}  // namespace

void Cut::require_older(const Cut& since) const {
  require_open();
  since.require_open();
  if (&since.store_ != &store_ || since.layer_->serial >= layer_->serial) {
    throw std::invalid_argument("changes are those since an older cut of the same store");
  }
}

std::vector<std::shared_ptr<CutLayer>> Cut::layers_after(const Cut& since) const {
  uint64_t version;
  std::vector<std::shared_ptr<CutLayer>> layers = store_.layers_since(*since.layer_, &version);
  const auto is_younger = [&](const auto& layer) { return layer->serial >= layer_->serial; };
  layers.erase(std::remove_if(layers.begin(), layers.end(), is_younger), layers.end());
  return layers;
}

uint64_t Cut::num_changed(Cut& since) {
  if (&since == this) return 0;
  const std::scoped_lock lock(mutex_, since.mutex_);
  require_older(since);
  uint64_t total = 0;
  for (const auto& layer : layers_after(since)) total += layer->count();
  return total;
}

// Built once for a pair of cuts: one pass over the layers' lists, then a counting sort by block.
const ChangeIndex& Cut::changes_since(const Cut& since) {
  if (index_.since_serial == since.layer_->serial) return index_;
  std::vector<uint32_t> first_block;
  uint32_t num_blocks = 0;
  for (const auto& blocks : blocks_) {
    first_block.push_back(num_blocks);
    num_blocks += static_cast<uint32_t>(blocks.size());
  }
  ChangeIndex index;
  index.starts.assign(num_blocks + 1, 0);
  std::vector<ChangeIndex::Change> found;
  std::vector<uint32_t> block_of;
  const auto add = [&](const SavedHead& head) {
    const uint32_t block = first_block[head.table] + row_block(head.id(), store_.table(head.table).log2_blocks);
    found.push_back({static_cast<uint64_t>(head.id()), head.slot});
    block_of.push_back(block);
    ++index.starts[block + 1];
  };
  for (const auto& layer : layers_after(since)) {
    const std::lock_guard<std::mutex> lock(layer->entries_mutex);
    for (const auto& arena : layer->arenas) {
      arena->records().for_each(add);
      arena->absents().for_each(add);
    }
  }
  for (uint32_t block = 0; block < num_blocks; ++block) index.starts[block + 1] += index.starts[block];
  std::vector<size_t> at(index.starts.begin(), index.starts.end() - 1);
  index.changes.resize(found.size());
  for (size_t i = 0; i < found.size(); ++i) index.changes[at[block_of[i]]++] = found[i];
  index.since_serial = since.layer_->serial;
  index_ = std::move(index);
  return index_;
}

ChangeExport::ChangeExport(Cut& cut, Cut& since, uint32_t table, uint32_t block) : arena_(cut.store_.arena_of(table)) {
  if (&cut == &since) throw std::invalid_argument("changes are those since an older cut of the same store");
  lock_ = std::unique_lock<std::mutex>(cut.mutex_, std::defer_lock);
  since_lock_ = std::unique_lock<std::mutex>(since.mutex_, std::defer_lock);
  std::lock(lock_, since_lock_);
  cut.require_older(since);
  RowStore& store = cut.store_;
  const IdMap* map = cut.blocks_.at(table).at(block).get();
  if (map == nullptr || map != since.blocks_[table][block].get()) {
    throw std::invalid_argument("table '" + store.table(table).name + "': block " + std::to_string(block) +
                                (map == nullptr ? " is not owned" : " was not owned at the older cut"));
  }
  const ChangeIndex& index = cut.changes_since(since);
  size_t place = block;
  for (uint32_t t = 0; t < table; ++t) place += cut.blocks_[t].size();
  std::vector<Change> changes(index.changes.begin() + index.starts[place], index.changes.begin() + index.starts[place + 1]);
  reader_ = std::make_unique<CutReader>(store, &cut, table);
  CutReader before(store, &since, table);
  radix_sort(&changes, [](const Change& change) { return change.id; });
  compare(before, changes, store.hasher_of(table));
}

// One id may have several slots, deleted in one and made in another, and a slot may be named by several layers.
void ChangeExport::compare(CutReader& before, const std::vector<Change>& changes, const RowHasher& hasher) {
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < changes.size();) {
    const uint64_t id = changes[i].id;
    bool was_there = false, is_there = false, is_equal = false;
    size_t end = i;
    for (; end < changes.size() && changes[end].id == id; ++end) {
      if (end + kAhead < changes.size()) arena_.prefetch(changes[end + kAhead].slot);
      const uint32_t slot = changes[end].slot;
      const auto is_again = [&](const Change& earlier) { return earlier.slot == slot; };
      if (std::any_of(changes.begin() + i, changes.begin() + end, is_again)) continue;
      bool is_absent;
      const SavedHead* old = before.find_saved(slot, &is_absent);
      const std::byte* now = reader_->read(slot);
      if (old != nullptr) {
        was_there = true;
        delta_ -= hasher.hash(old->record());
      }
      if (now == nullptr) continue;
      is_there = true;
      delta_ += hasher.hash(now);
      is_equal = old != nullptr && is_same_row(arena_.layout, old->record(), now);
      rows_.push_back(changes[end]);
    }
    if (is_equal) rows_.pop_back();
    if (was_there && !is_there) deleted_.push_back(static_cast<int64_t>(id));
    i = end;
  }
}

void ChangeExport::fill(const RowColumns& to, int64_t* deleted) {
  copy_rows(*reader_, arena_, rows_, to);
  std::copy(deleted_.begin(), deleted_.end(), deleted);
}

}  // namespace shoal
