// Eight-lane float vectors (GCC vector extensions, so that x86-64-v3 and NEON share one source) and row decoding.
//
// Everything here is elementwise: a result never depends on how a row is cut into vectors, chunks or tails.
#pragma once

#include <cstdint>
#include <cstring>

namespace shoal::step {

typedef float v8 __attribute__((vector_size(32)));
typedef float v8_unaligned __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16)));
typedef float v4_unaligned __attribute__((vector_size(16), aligned(4), may_alias));

inline v8 load8(const float* p) { return *reinterpret_cast<const v8_unaligned*>(p); }
inline void store8(float* p, v8 value) { *reinterpret_cast<v8_unaligned*>(p) = value; }
inline v4 load4(const float* p) { return *reinterpret_cast<const v4_unaligned*>(p); }
inline void store4(float* p, v4 value) { *reinterpret_cast<v4_unaligned*>(p) = value; }

inline v8 splat8(float x) { return v8{x, x, x, x, x, x, x, x}; }

// a * b + c with one rounding, written out because builds use -ffp-contract=off.
inline v8 fma8(v8 a, v8 b, v8 c) {
#if defined(__FMA__)
  return __builtin_ia32_vfmaddps256(a, b, c);
#else
  v8 result;
  for (int i = 0; i < 8; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return result;
#endif
}

// Stores past the caches, without reading the line first; `p` is 32-byte aligned. Weakly ordered: see stream_fence.
inline void stream8(float* p, v8 value) {
#if defined(__AVX__)
  __builtin_ia32_movntps256(p, value);
#else
  store8(p, value);
#endif
}
// Orders earlier stream8 before whatever tells other threads that the data is there.
inline void stream_fence() {
#if defined(__AVX__)
  __builtin_ia32_sfence();
#endif
}

// Adds the lanes in a fixed tree, the same on every machine.
inline float sum_lanes(v8 a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

// Calls fn(std::integral_constant-like width tag, first column) for the vector chunks of a row of `dim` floats and
// leaves the last dim % 4 columns to `tail(first column)`.
template <int kVectors>
struct Chunk {
  static constexpr int kCount = kVectors;  // number of v8 in the chunk; 0 means one v4
};

template <class Body, class Tail>
inline void for_each_chunk(int dim, Body&& body, Tail&& tail) {
  int column = 0;
  for (; dim - column >= 64; column += 64) body(Chunk<8>{}, column);
  if (dim - column >= 32) body(Chunk<4>{}, column), column += 32;
  if (dim - column >= 16) body(Chunk<2>{}, column), column += 16;
  if (dim - column >= 8) body(Chunk<1>{}, column), column += 8;
  if (dim - column >= 4) body(Chunk<0>{}, column), column += 4;
  for (; column < dim; ++column) tail(column);
}

// sum += x, `dim` floats each.
inline void add_row(float* sum, const float* x, int dim) {
  for_each_chunk(
      dim,
      [&](auto chunk, int column) {
        constexpr int kVectors = decltype(chunk)::kCount;
        if constexpr (kVectors == 0)
          store4(sum + column, load4(sum + column) + load4(x + column));
        else
          for (int v = 0; v < kVectors; ++v)
            store8(sum + column + 8 * v, load8(sum + column + 8 * v) + load8(x + column + 8 * v));
      },
      [&](int column) { sum[column] = sum[column] + x[column]; });
}

inline void prefetch_bytes(const void* address, int64_t num_bytes) {
  const char* p = static_cast<const char*>(address);
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(p + i);
}

}  // namespace shoal::step
