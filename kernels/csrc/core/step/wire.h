// The ids section of an exchange (requester -> owner), little endian, 8-byte aligned:
//   uint32 k; k == kDense: uint32 count per table of the plan
//             else:        k pairs (uint32 table, uint32 count > 0), tables ascending
//   zero padding to 8 bytes; then per table in plan order its ids (int32 where the declared range fits, else int64),
//   each table's ids padded to 8 bytes. A section without ids has 0 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/step/lookup.h"

namespace shoal::step {

constexpr uint32_t kDense = 0xffffffffu;

// Bytes of a section that asks for these runs.
int64_t ids_section_bytes(const StepPlan& plan, const Run* begin, const Run* end);

// Bytes of a section's counts, padding included.
int64_t ids_header_bytes(const StepPlan& plan, int64_t num_runs);
void write_ids_header(const StepPlan& plan, const Run* begin, const Run* end, std::byte* out);

// Bytes of `count` ids of a table, padding included.
inline int64_t ids_bytes(const Table& table, int64_t count) { return (count * (table.is_wide ? 8 : 4) + 7) & ~int64_t{7}; }

// Writes `count` ids of a table where a section has them, padding included.
void write_table_ids(const Table& table, const uint64_t* ids, int64_t count, std::byte* out);

// Reads the counts of a section of `bytes` bytes from `peer`; appends its runs, whose `start` counts on from
// `first_row`, and where each run's ids lie. Throws ProtocolViolation for counts that do not add up to `bytes`, before
// reading a byte outside the section. Returns the number of ids. With `end` more may follow: it is set to the bytes read.
int64_t read_ids_header(const StepPlan& plan, int peer, const std::byte* section, int64_t bytes, int64_t first_row,
                        std::vector<Run>* runs, std::vector<const std::byte*>* data, int64_t* end = nullptr);

// Decodes a run's ids and checks that each lies in its table and is a row of `owner`.
void read_ids(const StepPlan& plan, int peer, int owner, int table, const std::byte* data, int64_t count, int64_t* ids);

}  // namespace shoal::step
