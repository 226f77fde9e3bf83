#include "core/store/rowstore.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace shoal {

StepScalars make_scalars(const TableDesc& table, uint32_t step, float lr) {
  StepScalars s;
  s.lr = lr;
  s.lr_decay = lr * table.weight_decay;
  s.eps = table.eps;
  s.beta1 = static_cast<float>(table.beta1);
  s.beta2 = static_cast<float>(table.beta2);
  s.rest1 = static_cast<float>(1.0 - table.beta1);
  s.rest2 = static_cast<float>(1.0 - table.beta2);
  s.weight_decay = table.weight_decay;
  s.decay_mode = table.weight_decay == 0.0f ? WeightDecayMode::NONE : table.decay_mode;
  s.step = step;
  if (table.optimizer == OptimizerKind::ADAM) {
    const double t = step;
    s.adam_lr = static_cast<float>(double{lr} / (1.0 - std::pow(table.beta1, t)));
    s.adam_inverse = static_cast<float>(1.0 / (1.0 - std::pow(table.beta2, t)));
  }
  return s;
}

RowStore::RowStore(std::vector<TableDesc> tables, uint32_t num_threads, uint32_t undo_steps)
    : tables_(std::move(tables)), num_threads_(std::max(1u, num_threads)), undo_steps_(undo_steps) {
  for (uint32_t index = 0; index < num_tables(); ++index) {
    TableDesc& table = tables_[index];
    table.index = index;
    table.slot_width = slot_width(table.optimizer, table.dim);
    const auto same = std::find_if(arenas_.begin(), arenas_.end(), [&](const auto& arena) {
      const RecordLayout& l = arena->layout;
      return l.dim == table.dim && l.slot_width == table.slot_width && l.type == table.type;
    });
    table.arena = static_cast<uint32_t>(same - arenas_.begin());
    if (same == arenas_.end()) {
      arenas_.push_back(std::make_unique<Arena>(table.dim, table.slot_width, table.type));
      hashers_.push_back(std::make_unique<RowHasher>(4 * size_t{table.slot_width}, table.dim * row_type_bytes(table.type)));
    }
    TableState& state = states_.emplace_back();
    state.blocks.resize(size_t{1} << table.log2_blocks);
    state.replicas.resize(size_t{1} << table.log2_blocks);
  }
}

RowStore::~RowStore() = default;

void RowStore::require_boundary(const char* what) const {
  if (!logs_.empty()) throw std::logic_error(std::string(what) + " needs a step boundary: commit or undo first");
}

uint64_t RowStore::arena_bytes() const {
  uint64_t total = 0;
  for (const auto& arena : arenas_) total += arena->bytes();
  return total;
}

void RowStore::create(const TableDesc& table, std::byte* record) {
  RowHeader* head = header(record);
  head->state = kExists;
  IdMap* map = block(table.index, fmix64(static_cast<uint64_t>(head->id)));
  map->num_rows.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace shoal
