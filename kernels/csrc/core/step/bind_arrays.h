// Arrays between Python and the step kernels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "core/step/plan.h"

namespace shoal::step {

namespace nb = nanobind;

using Int64s = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int32s = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline nb::object to_numpy(const std::vector<int64_t>& values) {
  auto* data = new int64_t[std::max<size_t>(1, values.size())];
  std::copy(values.begin(), values.end(), data);
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(data, {values.size()}, owner));
}

inline const int64_t* per_rank(const StepPlan& plan, const Int64s& array) {
  if (static_cast<int64_t>(array.shape(0)) != plan.world_size) throw std::invalid_argument("expected one entry per rank");
  return array.data();
}

}  // namespace shoal::step
