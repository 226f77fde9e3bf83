// What changed between two cuts. The layers from the older cut up to the younger one name every row that may differ.
#include <algorithm>
#include <stdexcept>

#include "core/store/cut.h"

namespace shoal {

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
std::shared_ptr<const ChangeIndex> Cut::changes_since(const Cut& since) {
  if (index_ != nullptr && index_->since_serial == since.layer_->serial) return index_;
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
  uint64_t count = 0;
  for (const auto& layer : index.layers) count += layer->count();
  found.reserve(count);
  block_of.reserve(count);
  for (auto layer = index.layers.begin(); layer != index.layers.end(); ++layer) {
    for (size_t arena = 0; arena < (*layer)->arenas.size(); ++arena) {
      const auto add = [&](const SavedHead& head, bool exists) {
        const auto has_it = [&](const auto& older) { return older->arenas[arena]->find(head.slot) != ArenaLayer::kNone; };
        if (std::any_of(index.layers.begin(), layer, has_it)) return;
        const uint32_t block = first_block[head.table] + row_block(head.id(), store_.table(head.table).log2_blocks);
        found.push_back({&head, head.slot, exists});
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
  index_ = std::make_shared<const ChangeIndex>(std::move(index));
  return index_;
}

}  // namespace shoal
