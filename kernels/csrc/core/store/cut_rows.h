// Rows of a cut copied to columns.
#pragma once

#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/store/cut.h"

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

// Copy what `rows` (of `id` and `slot`) were at the reader's cut into the columns.
template <typename Row>
void copy_rows(CutReader& reader, const Arena& arena, const std::vector<Row>& rows, const RowColumns& to) {
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size()) arena.prefetch(rows[i + kAhead].slot);
    const std::byte* record = reader.read(rows[i].slot);
    if (record == nullptr) throw std::logic_error("a row vanished between counting and copying");
    copy_row(arena.layout, record, i, to);
  }
}

}  // namespace shoal
