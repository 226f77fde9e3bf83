#include "core/step/held.h"

#include <algorithm>
#include <mutex>

#include "core/step/mirrors.h"

namespace shoal::step {
namespace {

constexpr int64_t kRowsPerTask = 1024;
constexpr int64_t kAhead = 8;
constexpr double kSquareMax = 0x1p62, kUnit = 0x1p64;
// The sum at which nobody asks for more, and far enough from the end of the integers that two of them can be added.
constexpr unsigned __int128 kSumMax = static_cast<unsigned __int128>(1) << 126;

unsigned __int128 add_saturated(unsigned __int128 a, unsigned __int128 b) { return std::min(a + b, kSumMax); }

}  // namespace

void HeldGradients::collect(Updater* updater) {
  for (int t = 0; t < plan_->num_tables(); ++t) updater->collect(t, &tables_[t]);
}

unsigned __int128 HeldGradients::squares() const {
  unsigned __int128 total = 0;
  std::mutex mutex;
  for (int t = 0; t < plan_->num_tables(); ++t) {
    const int dim = plan_->tables[t].dim;
    const int64_t n = num_rows(t);
    plan_->threads->run((n + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
      unsigned __int128 sum = 0;
      for (int64_t i = task * kRowsPerTask; i < std::min(n, (task + 1) * kRowsPerTask); ++i) {
        const float* gradient = tables_[t].gradients.data() + i * dim;
        double square = 0;
        for (int d = 0; d < dim; ++d) square += static_cast<double>(gradient[d]) * gradient[d];
        // Not a number is not below the bound either.
        sum = add_saturated(sum, square < kSquareMax ? static_cast<unsigned __int128>(square * kUnit) : kSumMax);
      }
      const std::lock_guard<std::mutex> lock(mutex);
      total = add_saturated(total, sum);
    });
  }
  return total;
}

void HeldGradients::scale(float factor) {
  for (int t = 0; t < plan_->num_tables(); ++t) {
    const int64_t floats = num_rows(t) * plan_->tables[t].dim;
    float* gradients = tables_[t].gradients.data();
    for (int64_t i = 0; i < floats; ++i) gradients[i] = gradients[i] * factor;
  }
}

void HeldGradients::apply(uint32_t step, const float* lrs) {
  plan_->store->begin_step(step);
  for (int t = 0; t < plan_->num_tables(); ++t) {
    if (plan_->tables[t].shares_statistic) continue;
    const int dim = plan_->tables[t].dim;
    const int64_t n = num_rows(t);
    const StepScalars scalars = make_scalars(plan_->store->table(t), step, lrs[t]);
    const BlockGradients& held = tables_[t];
    plan_->threads->run((n + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int thread) {
      const int64_t end = std::min(n, (task + 1) * kRowsPerTask);
      with_updater(*plan_->store, t, scalars, thread, [&](auto&& updater) {
        for (int64_t i = task * kRowsPerTask; i < end; ++i) {
          if (i + kAhead < end) updater.prefetch(held.slots[i + kAhead]);
          updater.update(held.slots[i], held.gradients.data() + i * dim);
        }
      });
    });
    if (plan_->tables[t].is_mirrored) plan_->mirrors->touch(t, held.slots.data(), n);
  }
  if (plan_->mirrors) plan_->mirrors->settle();
}

}  // namespace shoal::step
