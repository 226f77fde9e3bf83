// What the byte rule of the two flows needs to know of a batch, whatever flow a table has.
#include <algorithm>

#include "core/step/lookup.h"

namespace shoal::step {

void Lookup::flow_counts(int64_t* out) const {
  const uint32_t dropped = static_cast<uint32_t>(num_positions_);
  plan_->threads->run(plan_->num_tables(), [&](int64_t t, int) {
    const Table& table = plan_->tables[t];
    int64_t* counts = out + 4 * t;
    std::fill(counts, counts + 4, 0);
    counts[0] = num_unique_[t];
    const int64_t start = position_start_[t];
    std::vector<uint32_t> blocks(num_unique_[t]);
    for (int64_t i = 0; i < num_unique_[t]; ++i)
      blocks[i] = row_block(static_cast<int64_t>(unique_ids_[start + i]), table.log2_blocks);
    // The last bag, counted from 1 over all features, in which a block or an owner was seen.
    std::vector<int64_t> block_bag(size_t{1} << table.log2_blocks, 0), owner_bag(plan_->world_size, 0);
    int64_t bag = 0;
    for (int f : table.features) {
      const uint32_t* bags = bag_offsets_.data() + f * (batch_size_ + 1);
      for (int64_t b = 0; b < batch_size_; ++b) {
        ++bag;
        for (uint32_t p = bags[b]; p < bags[b + 1]; ++p) {
          if (inverse_[p] == dropped) continue;
          const uint32_t block = blocks[inverse_[p] - start];
          const uint16_t owner = table.owners[table.has_one_owner ? 0 : block];
          ++counts[1];
          counts[2] += block_bag[block] != bag;
          counts[3] += owner_bag[owner] != bag;
          block_bag[block] = owner_bag[owner] = bag;
        }
      }
    }
  });
}

}  // namespace shoal::step
