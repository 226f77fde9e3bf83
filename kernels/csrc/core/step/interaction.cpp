// DLRM's dot interaction: the dense vector, then the dot products of all pairs of {dense, sparse_0 .. sparse_F-1} in
// the order of an upper triangle read row by row (TorchRec's InteractionArch). One sample at a time, in cache.
#include "core/step/interaction.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "core/step/simd.h"
#include "core/step/threads.h"

namespace shoal::step {
namespace {

constexpr int kTileRows = 3;     // rows of the Gram matrix held in registers
constexpr int kTileVectors = 4;  // times vectors of 8 columns
constexpr int64_t kSamplesPerTask = 16;

int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Scratch of one thread: the sample's vectors, transposed, and its Gram matrix or the gradient's.
struct Scratch {
  std::vector<float> transposed, gram, padded, sums;
};

// gram[i][j] = <x_i, x_j> for j >= i, summed over columns in ascending order. `xt` is [dim][stride], zero padded.
template <int kRows>
void gram_rows(const float* const* x, const float* xt, int dim, int stride, int i0, float* gram) {
  for (int j0 = i0 / 8 * 8; j0 < stride; j0 += 8 * kTileVectors) {
    const int vectors = std::min(kTileVectors, (stride - j0) / 8);
    v8 acc[kRows][kTileVectors] = {};
    if (vectors == kTileVectors) {
      for (int d = 0; d < dim; ++d) {
        const float* column = xt + static_cast<int64_t>(d) * stride + j0;
        v8 y[kTileVectors];
        for (int v = 0; v < kTileVectors; ++v) y[v] = load8(column + 8 * v);
        for (int r = 0; r < kRows; ++r) {
          const v8 a = splat8(x[i0 + r][d]);
          for (int v = 0; v < kTileVectors; ++v) acc[r][v] = fma8(a, y[v], acc[r][v]);
        }
      }
    } else {
      for (int d = 0; d < dim; ++d) {
        const float* column = xt + static_cast<int64_t>(d) * stride + j0;
        for (int v = 0; v < vectors; ++v) {
          const v8 y = load8(column + 8 * v);
          for (int r = 0; r < kRows; ++r) acc[r][v] = fma8(splat8(x[i0 + r][d]), y, acc[r][v]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < vectors; ++v) store8(gram + static_cast<int64_t>(i0 + r) * stride + j0 + 8 * v, acc[r][v]);
  }
}

void sample_forward(const float* const* x, int n, int dim, float* out, Scratch& scratch) {
  const int stride = round_up(n, 8);
  float* xt = scratch.transposed.data();
  float* gram = scratch.gram.data();
  for (int j = 0; j < n; ++j)
    for (int d = 0; d < dim; ++d) xt[static_cast<int64_t>(d) * stride + j] = x[j][d];
  int i = 0;
  for (; i + kTileRows <= n; i += kTileRows) gram_rows<kTileRows>(x, xt, dim, stride, i, gram);
  for (; i < n; ++i) gram_rows<1>(x, xt, dim, stride, i, gram);
  std::copy(x[0], x[0] + dim, out);
  out += dim;
  for (i = 0; i < n; ++i) {
    const float* row = gram + static_cast<int64_t>(i) * stride;
    for (int j = i + 1; j < n; ++j) *out++ = row[j];
  }
}

// grad[i] = sum over j of s[i][j] * x[j], j ascending; s is symmetric with a zero diagonal.
template <int kRows, int kVectors>
void mix_rows(const float* s, int stride, const float* const* x, int n, int column, float* const* grads) {
  v8 acc[kRows][kVectors] = {};
  for (int j = 0; j < n; ++j) {
    const float* y = x[j] + column;
    v8 z[kVectors];
    for (int v = 0; v < kVectors; ++v) z[v] = load8(y + 8 * v);
    for (int r = 0; r < kRows; ++r) {
      const v8 c = splat8(s[static_cast<int64_t>(r) * stride + j]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma8(c, z[v], acc[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store8(grads[r] + column + 8 * v, acc[r][v]);
}

template <int kRows>
void mix(const float* s, int stride, const float* const* x, int n, int dim, float* const* grads) {
  int column = 0;
  for (; dim - column >= 32; column += 32) mix_rows<kRows, 4>(s, stride, x, n, column, grads);
  if (dim - column >= 16) mix_rows<kRows, 2>(s, stride, x, n, column, grads), column += 16;
  if (dim - column >= 8) mix_rows<kRows, 1>(s, stride, x, n, column, grads), column += 8;
  for (; column < dim; ++column) {
    for (int r = 0; r < kRows; ++r) {
      float acc = 0;
      for (int j = 0; j < n; ++j) acc = __builtin_fmaf(s[static_cast<int64_t>(r) * stride + j], x[j][column], acc);
      grads[r][column] = acc;
    }
  }
}

void sample_backward(const float* const* x, int n, int dim, const float* grad_out, float* const* grads,
                     Scratch& scratch) {
  const int stride = round_up(n, 8);
  float* s = scratch.gram.data();
  const float* g = grad_out + dim;
  for (int i = 0; i < n; ++i) {
    s[static_cast<int64_t>(i) * stride + i] = 0;
    for (int j = i + 1; j < n; ++j) s[static_cast<int64_t>(i) * stride + j] = *g++;
  }
  for (int i = 1; i < n; ++i)
    for (int j = 0; j < i; ++j) s[static_cast<int64_t>(i) * stride + j] = s[static_cast<int64_t>(j) * stride + i];
  int i = 0;
  for (; i + kTileRows <= n; i += kTileRows)
    mix<kTileRows>(s + static_cast<int64_t>(i) * stride, stride, x, n, dim, grads + i);
  for (; i < n; ++i) mix<1>(s + static_cast<int64_t>(i) * stride, stride, x, n, dim, grads + i);
  for (int d = 0; d < dim; ++d) grads[0][d] += grad_out[d];
}

template <class Body>
void for_each_sample(int64_t batch, int num_sparse, int dim, int num_threads, Body&& body) {
  const int n = num_sparse + 1;
  const int stride = round_up(n, 8);
  Threads& threads = shared_threads(num_threads);
  std::vector<Scratch> scratch(threads.count());
  for (auto& s : scratch) {
    s.transposed.assign(static_cast<size_t>(stride) * dim, 0.f);
    s.gram.assign(static_cast<size_t>(stride) * n, 0.f);
  }
  const int64_t tasks = (batch + kSamplesPerTask - 1) / kSamplesPerTask;
  threads.run(tasks, [&](int64_t task, int thread) {
    const int64_t end = std::min(batch, (task + 1) * kSamplesPerTask);
    for (int64_t b = task * kSamplesPerTask; b < end; ++b) body(b, scratch[thread]);
  });
}

}  // namespace

Threads& shared_threads(int num_threads) {
  // One pool per calling thread and size: a pool serves one caller at a time.
  thread_local std::vector<std::unique_ptr<Threads>> pools;
  const size_t index = static_cast<size_t>(std::max(1, num_threads));
  if (pools.size() <= index) pools.resize(index + 1);
  if (!pools[index]) pools[index] = std::make_unique<Threads>(static_cast<int>(index));
  return *pools[index];
}

void interaction_forward(const float* dense, const float* sparse, int64_t batch, int num_sparse, int dim, float* out,
                         int num_threads) {
  const int n = num_sparse + 1;
  const int64_t out_width = dim + static_cast<int64_t>(n) * (n - 1) / 2;
  for_each_sample(batch, num_sparse, dim, num_threads, [&](int64_t b, Scratch& scratch) {
    const float* x[kInteractionMaxVectors];
    x[0] = dense + b * dim;
    for (int f = 0; f < num_sparse; ++f) x[f + 1] = sparse + (b * num_sparse + f) * dim;
    sample_forward(x, n, dim, out + b * out_width, scratch);
  });
}

void interaction_backward(const float* dense, const float* sparse, const float* grad_out, int64_t batch,
                          int num_sparse, int dim, float* grad_dense, float* grad_sparse, int num_threads) {
  const int n = num_sparse + 1;
  const int64_t out_width = dim + static_cast<int64_t>(n) * (n - 1) / 2;
  for_each_sample(batch, num_sparse, dim, num_threads, [&](int64_t b, Scratch& scratch) {
    const float* x[kInteractionMaxVectors];
    float* g[kInteractionMaxVectors];
    x[0] = dense + b * dim;
    g[0] = grad_dense + b * dim;
    for (int f = 0; f < num_sparse; ++f) {
      x[f + 1] = sparse + (b * num_sparse + f) * dim;
      g[f + 1] = grad_sparse + (b * num_sparse + f) * dim;
    }
    sample_backward(x, n, dim, grad_out + b * out_width, g, scratch);
  });
}

}  // namespace shoal::step
