#include "core/store/crc32c.h"

#include <array>
#include <cstring>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace shoal {

namespace {

#if !defined(__SSE4_2__) && !defined(__ARM_FEATURE_CRC32)
constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
    table[byte] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = make_table();
#endif

uint32_t add_byte(uint32_t crc, uint8_t byte) {
#if defined(__SSE4_2__)
  return _mm_crc32_u8(crc, byte);
#elif defined(__ARM_FEATURE_CRC32)
  return __crc32cb(crc, byte);
#else
  return (crc >> 8) ^ kTable[(crc ^ byte) & 0xFF];
#endif
}

uint32_t add_word(uint32_t crc, const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
#if defined(__SSE4_2__)
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#elif defined(__ARM_FEATURE_CRC32)
  return __crc32cd(crc, word);
#else
  for (int i = 0; i < 8; ++i) crc = add_byte(crc, at[i]);
  return crc;
#endif
}

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; size >= 8; size -= 8, at += 8) crc = add_word(crc, at);
  for (; size > 0; --size, ++at) crc = add_byte(crc, *at);
  return ~crc;
}

uint32_t crc32c_quarters(const void* data, size_t size) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  const size_t quarter = size / 32 * 8;
  uint32_t crcs[5] = {~0u, ~0u, ~0u, ~0u, 0};
  for (size_t i = 0; i < quarter; i += 8) {
    for (size_t lane = 0; lane < 4; ++lane) crcs[lane] = add_word(crcs[lane], at + lane * quarter + i);
  }
  crcs[4] = crc32c(0, at + 4 * quarter, size - 4 * quarter);
  return crc32c(0, crcs, sizeof(crcs));
}

}  // namespace shoal
