// A record as columns.
#pragma once

#include <cstring>

#include "core/store/rowstore.h"

namespace shoal {

// Copy one row into place `at` of the columns.
inline void copy_row(const RecordLayout& layout, const std::byte* record, size_t at, const RowColumns& to) {
  const size_t weight_bytes = layout.dim * row_type_bytes(layout.type), slot_bytes = size_t{layout.slot_width} * 4;
  const RowHeader* head = header(record);
  to.ids[at] = head->id;
  to.last_step[at] = head->last_step;
  to.count[at] = head->state & kCountMask;
  if (slot_bytes != 0) std::memcpy(to.slots + at * layout.slot_width, slots(record), slot_bytes);
  std::memcpy(to.weights + at * weight_bytes, record + layout.weights_offset, weight_bytes);
}

}  // namespace shoal
