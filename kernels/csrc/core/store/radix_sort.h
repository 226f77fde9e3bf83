// Sorting by integer keys: slots into the order of memory, rows into the order of ids.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace shoal {

namespace detail {
inline constexpr uint32_t kDigitBits = 8;
inline constexpr size_t kDigits = size_t{1} << kDigitBits;
inline constexpr size_t kRadixSizeMin = 256;  // Smaller ranges: comparisons are faster.

// Stable scatter of items by one digit; `ends` receives the end of each digit's range.
template <typename T, typename Key>
void scatter(const T* from, size_t count, T* to, uint32_t shift, Key key, std::array<size_t, kDigits>* ends) {
  std::array<size_t, kDigits>& at = *ends;
  at.fill(0);
  for (size_t i = 0; i < count; ++i) ++at[(key(from[i]) >> shift) % kDigits];
  size_t total = 0;
  for (size_t& start : at) {
    const size_t size = start;
    start = total;
    total += size;
  }
  for (size_t i = 0; i < count; ++i) to[at[(key(from[i]) >> shift) % kDigits]++] = from[i];
}

// Sort `items` by the key's bits below `high`, from the highest digit down: after one or two scatters the ranges fit the
// cache and are soon small enough for comparisons. `spare` has the same size.
template <typename T, typename Key>
void radix_sort(T* items, T* spare, size_t count, uint32_t high, Key key) {
  if (count < kRadixSizeMin || high == 0) {
    std::sort(items, items + count, [&](const T& a, const T& b) { return key(a) < key(b); });
    return;
  }
  const uint32_t shift = high > kDigitBits ? high - kDigitBits : 0;
  std::array<size_t, kDigits> ends;
  scatter(items, count, spare, shift, key, &ends);
  std::memcpy(static_cast<void*>(items), spare, count * sizeof(T));
  size_t from = 0;
  for (const size_t to : ends) {
    if (to - from > 1) radix_sort(items + from, spare + from, to - from, shift, key);
    from = to;
  }
}

}  // namespace detail

// Sort by `key(item)`, a uint64. Not stable.
template <typename T, typename Key>
void radix_sort(std::vector<T>* items, Key key) {
  if (items->empty()) return;
  uint64_t varying = 0;
  for (const T& item : *items) varying |= key(item) ^ key(items->front());
  std::vector<T> spare(items->size());
  const uint32_t high = varying == 0 ? 0 : 64 - __builtin_clzll(varying);
  detail::radix_sort(items->data(), spare.data(), items->size(), high, key);
}

}  // namespace shoal
