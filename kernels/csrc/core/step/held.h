// Summed gradients of a step, held until it is known by how much they are scaled (clipping by global norm).
#pragma once

#include <cstdint>
#include <vector>

#include "core/step/apply.h"

namespace shoal::step {

class HeldGradients {
 public:
  explicit HeldGradients(StepPlan* plan) : plan_(plan), tables_(plan->tables.size()) {}
  HeldGradients(const HeldGradients&) = delete;
  HeldGradients& operator=(const HeldGradients&) = delete;

  // Sums the gradients of the step's rows; the memory that they are read from is not needed afterwards.
  void collect(Updater* updater);
  // Sum of the squares of all gradients held, as an integer: a row's sum (double, in column order) times 2^64, rounded
  // down. So the order of rows and the owners they are spread over do not matter. It ends at 2^126: a row that is not
  // finite, or whose squares reach 2^62, counts as that, and the sums of all owners reach it if and only if the exact
  // one does.
  unsigned __int128 squares() const;
  // Multiplies what is held.
  void scale(float factor);
  // Updates every row once, but for tables that share a statistic. Opens the store's step. lrs: [tables].
  void apply(uint32_t step, const float* lrs);
  BlockGradients* table(int t) { return &tables_[t]; }

 private:
  int64_t num_rows(int t) const { return static_cast<int64_t>(tables_[t].slots.size()); }

  StepPlan* plan_;
  std::vector<BlockGradients> tables_;
};

}  // namespace shoal::step
