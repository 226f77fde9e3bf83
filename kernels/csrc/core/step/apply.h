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
  const std::byte* sums;   // another rank's: [count] encoded rows
  int group;               // sources of one group are summed before the groups are
  const int64_t* ids;      // [count]
  const float* summed;     // [count, dim]: sums of this rank's own making (pooled flow), or null
};

// The summed gradients of the rows of one table in a step, row block by row block, in order of first contribution.
struct BlockGradients {
  std::vector<uint32_t> slots;         // [rows]
  std::vector<int64_t> ids;            // [rows]
  std::vector<int64_t> block_starts;   // [row blocks + 1]
  Buffer<float> gradients;             // [rows, dim]
};

struct Merge;

class Updater {
 public:
  // `sources`: [lookups][world] addresses of the received gradient sections.
  Updater(StepPlan* plan, const std::vector<Lookup*>& lookups, const int64_t* sources);
  // Opens the store's step if it is not open, then updates every row once, but for tables that share a statistic
  // (statistics.h). lrs: [tables].
  void apply(uint32_t step, const float* lrs);
  // Sums the gradients of each row of a table and leaves them to the caller.
  void collect(int table, BlockGradients* out);

 private:
  // The gradient of a source's row i as it counts: in `space` [dim], or where it lies.
  const float* gradient(int table, const GradSource& source, int64_t i, float* space) const;
  void update_single(int table, const GradSource& source, const StepScalars& scalars);
  void update_merged(int table, const std::vector<GradSource>& sources, const StepScalars& scalars);
  // Calls visit(thread, begin, end, gradient_of) for ranges of the merged rows.
  template <class Visit>
  void sum_merged(int table, const std::vector<GradSource>& sources, const Merge& rows, Visit&& visit);

  StepPlan* plan_;
  std::vector<std::vector<GradSource>> sources_;  // [tables], in (lookup, source rank) order
};

}  // namespace shoal::step
