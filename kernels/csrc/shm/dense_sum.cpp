#include "shm/dense_sum.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace shoal {

void sum_in_order(const int64_t* sources, int64_t num_sources, int64_t n, float* out) {
  if (num_sources == 0) return;
  // Blocks small enough for the first-level cache: each source is read once, the partial sums never leave the core.
  constexpr int64_t kBlock = 2048;
  alignas(64) float sum[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = std::min(kBlock, n - begin);
    std::memcpy(sum, reinterpret_cast<const float*>(sources[0]) + begin, static_cast<size_t>(count) * sizeof(float));
    for (int64_t s = 1; s < num_sources; ++s) {
      const float* src = reinterpret_cast<const float*>(sources[s]) + begin;
      for (int64_t i = 0; i < count; ++i) sum[i] += src[i];
    }
    std::memcpy(out + begin, sum, static_cast<size_t>(count) * sizeof(float));
  }
}

void scatter_copy(const void* from, const int64_t* offsets, const int64_t* bytes, int64_t count,
                  const int64_t* addresses) {
  for (int64_t w = 0; w < count; ++w) {
    if (bytes[w] > 0) {
      std::memcpy(reinterpret_cast<void*>(addresses[w]), static_cast<const char*>(from) + offsets[w],
                  static_cast<size_t>(bytes[w]));
    }
  }
}

void gather_copy(const int64_t* addresses, const int64_t* bytes, const int64_t* offsets, int64_t count, void* to) {
  for (int64_t w = 0; w < count; ++w) {
    if (bytes[w] > 0) {
      std::memcpy(static_cast<char*>(to) + offsets[w], reinterpret_cast<const void*>(addresses[w]),
                  static_cast<size_t>(bytes[w]));
    }
  }
}

}  // namespace shoal
