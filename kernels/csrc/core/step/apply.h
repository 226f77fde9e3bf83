// The end of a step on the owner: sum each row's gradients over lookups and source ranks, update it once.
#pragma once

#include <cstdint>
#include <vector>

#include "core/step/lookup.h"

namespace shoal::step {

// Gradients of rows of one table from one source rank in one lookup.
struct GradSource {
  const Lookup* lookup;
  const uint32_t* slots;   // [count]
  int64_t count;
  const uint32_t* order;   // this rank's own rows: their unique numbers; null for another rank's
  const float* sums;       // another rank's: [count, dim]
  int group;               // sources of one group are summed before the groups are
};

class Updater {
 public:
  // `sources`: [lookups][world] addresses of the received gradient sections.
  Updater(StepPlan* plan, const std::vector<Lookup*>& lookups, const int64_t* sources);
  // Opens the store's step if it is not open, then updates every row once. lrs: [tables].
  void apply(uint32_t step, const float* lrs);

 private:
  void update_single(int table, const GradSource& source, const StepScalars& scalars);
  void update_merged(int table, const std::vector<GradSource>& sources, const StepScalars& scalars);

  StepPlan* plan_;
  std::vector<std::vector<GradSource>> sources_;  // [tables], in (lookup, source rank) order
};

}  // namespace shoal::step
