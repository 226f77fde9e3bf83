// DLRM's dot interaction on the CPU, forward and backward. All arrays are contiguous float32.
#pragma once

#include <cstdint>
#include <memory>

#include "core/step/threads.h"

namespace shoal::step {

constexpr int kInteractionMaxVectors = 513;  // the dense vector and up to 512 sparse ones

// The pool of `num_threads` threads that belongs to the calling thread.
Threads& shared_threads(int num_threads);

// dense [batch, dim], sparse [batch, num_sparse, dim] -> out [batch, dim + n (n-1) / 2] with n = num_sparse + 1.
void interaction_forward(const float* dense, const float* sparse, int64_t batch, int num_sparse, int dim, float* out,
                         int num_threads);

// Gradients of the inputs; the outputs are overwritten.
void interaction_backward(const float* dense, const float* sparse, const float* grad_out, int64_t batch,
                          int num_sparse, int dim, float* grad_dense, float* grad_sparse, int num_threads);

}  // namespace shoal::step
