// CRC-32C (Castagnoli) of messages between workers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

// Continue the CRC-32C `crc` (0 at first) over more bytes.
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

// One value for a large buffer: the CRC-32Cs of its four quarters, and of what does not divide, chained. Four streams
// keep the instruction busy, whose result takes three cycles.
uint32_t crc32c_quarters(const void* data, size_t size);

}  // namespace shoal
