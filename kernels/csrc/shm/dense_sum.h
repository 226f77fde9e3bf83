// Sums and copies of flat float32 buffers for kernels/dense_reduce.py.
#pragma once

#include <cstdint>

namespace shoal {

// out[i] = ((src[0][i] + src[1][i]) + src[2][i]) + ..., in float32, for i in [0, n): the order of ranks, so the bits do
// not depend on who sums nor on how the buffer is cut. `out` may be one of the sources.
void sum_in_order(const int64_t* sources, int64_t num_sources, int64_t n, float* out);

// Copies bytes[w] bytes from `from` + offsets[w] to addresses[w], for every w with bytes[w] > 0.
void scatter_copy(const void* from, const int64_t* offsets, const int64_t* bytes, int64_t count,
                  const int64_t* addresses);

// The reverse: copies bytes[w] bytes from addresses[w] to `to` + offsets[w].
void gather_copy(const int64_t* addresses, const int64_t* bytes, const int64_t* offsets, int64_t count, void* to);

}  // namespace shoal
