// Mirrors: values of whole tables that every rank keeps to read (data parallel), current as of the last step.
//
// A mirrored table has owners like any other: they alone hold its rows, sum gradients and update. Nobody asks them for
// values: what an update changes is sent to every rank before the next lookup, so a mirror reads as the rows do. In a
// view's first exchange owners send all rows they have; rows that do not exist read as their initial value.
//
// A section of changed rows: uint64 bytes of the ids section, padded to 64 bytes; an ids section (wire.h), padded to 64;
// float32 rows in the order of the ids. Without changes it has 0 bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/step/plan.h"

namespace shoal::step {

class Mirrors {
 public:
  // Gives every mirrored table of the plan, all of them static, its initial values.
  explicit Mirrors(StepPlan* plan);

  const float* row(int table, uint64_t id) const { return values_[table].data() + id * plan_->tables[table].dim; }
  // Owner: all rows of mirrored tables that exist here have changed, as others see it.
  void touch_all();
  // Owner: these rows have been updated.
  void touch(int table, const uint32_t* slots, int64_t count);
  // Owner: ends a step's or touch_all's changes: this rank's own mirror takes them over.
  void settle();
  // Bytes of the section for every other rank; changes count up to the last settle.
  int64_t bytes() const;
  void write(std::byte* out) const;
  // All ranks have been told.
  void clear();
  // Takes over the section of `peer`. Throws ProtocolViolation for one that cannot be, before anything changes.
  void read(int peer, const std::byte* section, int64_t bytes);

 private:
  struct Change {
    int table;
    int64_t start, count;  // in ids_
  };

  StepPlan* plan_;
  std::vector<Buffer<float>> values_;          // [tables]; empty where not mirrored
  std::vector<std::vector<uint64_t>> touched_;  // [tables] ids since the last clear; ascending and unique when settled
};

}  // namespace shoal::step
