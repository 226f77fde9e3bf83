// Initial values and stochastic rounding: from integer bits to stored weights.
#pragma once

#include "core/store/hash.h"
#include "core/store/record.h"

namespace shoal {

// Initial weights of a row as float32 (before rounding to the row type).
void initial_values(const TableDesc& table, int64_t id, float* out);

// The row as it would be read after creation: initial values rounded to the table's row type, as float32.
void initial_row(const TableDesc& table, int64_t id, float* out);

// Round float32 to the table's row type and store. The rounding is stochastic and keyed by (seed, id, column, step),
// the column counted in the logical table: a value is rounded up with probability equal to its distance from the lower
// neighbour. Finite values saturate at the largest finite number; infinities and NaN stay what they are. `type` is F16 or BF16.
void encode_row(const TableDesc& table, int64_t id, uint64_t step, const float* values, std::byte* weights);

// Fill a fresh record: header, optimizer state and weights, marked reserved. The stamp is left as it is.
void materialise(const TableDesc& table, const RecordLayout& layout, int64_t id, std::byte* record);

}  // namespace shoal
