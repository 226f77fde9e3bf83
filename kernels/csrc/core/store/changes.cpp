// What changed between two cuts. The layers from the older cut up to the younger one name every row that may differ.
#include <algorithm>
#include <stdexcept>

#include "core/store/cut.h"
#include "core/store/copy_row.h"
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

// Built once for a pair of cuts: one pass over the layers' lists, then a counting sort by block. All lists stay locked
// meanwhile: absorbing would move rows from a layer not yet listed to one that has been.
const ChangeIndex& Cut::changes_since(const Cut& since) {
  if (index_.since_serial == since.layer_->serial) return index_;
  ChangeIndex index;
  std::vector<uint32_t> first_block;
  uint32_t num_blocks = 0;
  for (const auto& blocks : blocks_) {
    first_block.push_back(num_blocks);
    num_blocks += static_cast<uint32_t>(blocks.size());
  }
  index.starts.assign(num_blocks + 1, 0);
  index.layers = layers_after(since);
  std::vector<std::unique_lock<std::mutex>> locks;
  for (const auto& layer : index.layers) locks.emplace_back(layer->entries_mutex);
  std::vector<ChangeIndex::Change> found;
  std::vector<uint32_t> block_of;
  for (auto layer = index.layers.begin(); layer != index.layers.end(); ++layer) {
    for (size_t arena = 0; arena < (*layer)->arenas.size(); ++arena) {
      const auto add = [&](const SavedHead& head, bool exists) {
        const auto has_it = [&](const auto& older) { return older->arenas[arena]->find(head.slot) != ArenaLayer::kNone; };
        if (std::any_of(index.layers.begin(), layer, has_it)) return;
        const uint32_t block = first_block[head.table] + row_block(head.id(), store_.table(head.table).log2_blocks);
        found.push_back({static_cast<uint64_t>(head.id()), exists ? &head : nullptr, head.slot});
        block_of.push_back(block);
        ++index.starts[block + 1];
      };
      (*layer)->arenas[arena]->records().for_each([&](const SavedHead& head) { add(head, true); });
      (*layer)->arenas[arena]->absents().for_each([&](const SavedHead& head) { add(head, false); });
    }
  }
  for (uint32_t block = 0; block < num_blocks; ++block) index.starts[block + 1] += index.starts[block];
  std::vector<size_t> at(index.starts.begin(), index.starts.end() - 1);
  index.changes.resize(found.size());
  for (size_t i = 0; i < found.size(); ++i) index.changes[at[block_of[i]]++] = found[i];
  index.layers.erase(index.layers.begin());
  index.since_serial = since.layer_->serial;
  index_ = std::move(index);
  return index_;
}

ChangeExport::ChangeExport(Cut& cut, Cut& since, uint32_t table, uint32_t block)
    : arena_(cut.store_.arena_of(table)), hasher_(cut.store_.hasher_of(table)) {
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
  changes_.assign(index.changes.begin() + index.starts[place], index.changes.begin() + index.starts[place + 1]);
  radix_sort(&changes_, [](const Change& change) { return change.id; });
  reader_ = std::make_unique<CutReader>(store, &cut, table);
}

void ChangeExport::fill(const RowColumns& to, int64_t* deleted) {
  constexpr size_t kAhead = 8;
  for (size_t i = 0, ahead = 0; i < changes_.size();) {
    size_t end = i + 1;
    while (end < changes_.size() && changes_[end].id == changes_[i].id) ++end;
    for (; ahead < std::min(end + kAhead, changes_.size()); ++ahead) {
      const Change& next = changes_[ahead];
      reader_->prefetch(next.slot);
      if (next.before != nullptr) prefetch_range(next.before->record(), arena_.layout.stride);
    }
    compare(&changes_[i], &changes_[i] + (end - i), to, deleted);
    i = end;
  }
}

// All changes of one id. There are several where a row was deleted in one slot and made again in another: at either cut
// at most one of them holds it.
void ChangeExport::compare(const Change* first, const Change* last, const RowColumns& to, int64_t* deleted) {
  bool was_there = false, is_there = false, is_equal = false;
  for (const Change* change = first; change != last; ++change) {
    const std::byte* before = change->before == nullptr ? nullptr : change->before->record();
    const std::byte* now = reader_->read(change->slot);
    was_there = was_there || before != nullptr;
    if (before != nullptr && now != nullptr && is_same_row(arena_.layout, before, now)) {
      is_equal = true;
      continue;
    }
    if (before != nullptr) delta_ -= hasher_.hash(before);
    if (now == nullptr) continue;
    is_there = true;
    delta_ += hasher_.hash(now);
    copy_row(arena_.layout, now, static_cast<size_t>(num_rows_++), to);
  }
  if (was_there && !is_there && !is_equal) deleted[num_deleted_++] = static_cast<int64_t>(first->id);
}

}  // namespace shoal
