// Python binding of the dot interaction; addresses are plain integers (a tensor through nanobind costs 3 us).
#include <nanobind/nanobind.h>

#include <stdexcept>

#include "core/step/interaction.h"

namespace nb = nanobind;

namespace shoal {

void bind_interaction(nb::module_& m) {
  using namespace step;
  m.attr("INTERACTION_SPARSE_MAX") = kInteractionMaxVectors - 1;
  m.def(
      "interaction_forward",
      [](uintptr_t dense, uintptr_t sparse, int64_t batch, int num_sparse, int dim, uintptr_t out, int num_threads) {
        if (num_sparse < 0 || num_sparse >= kInteractionMaxVectors) throw std::invalid_argument("num_sparse");
        nb::gil_scoped_release release;
        interaction_forward(reinterpret_cast<const float*>(dense), reinterpret_cast<const float*>(sparse), batch,
                            num_sparse, dim, reinterpret_cast<float*>(out), num_threads);
      },
      nb::arg("dense"), nb::arg("sparse"), nb::arg("batch"), nb::arg("num_sparse"), nb::arg("dim"), nb::arg("out"),
      nb::arg("num_threads"));
  m.def(
      "interaction_backward",
      [](uintptr_t dense, uintptr_t sparse, uintptr_t grad_out, int64_t batch, int num_sparse, int dim,
         uintptr_t grad_dense, uintptr_t grad_sparse, int num_threads) {
        if (num_sparse < 0 || num_sparse >= kInteractionMaxVectors) throw std::invalid_argument("num_sparse");
        nb::gil_scoped_release release;
        interaction_backward(reinterpret_cast<const float*>(dense), reinterpret_cast<const float*>(sparse),
                             reinterpret_cast<const float*>(grad_out), batch, num_sparse, dim,
                             reinterpret_cast<float*>(grad_dense), reinterpret_cast<float*>(grad_sparse), num_threads);
      },
      nb::arg("dense"), nb::arg("sparse"), nb::arg("grad_out"), nb::arg("batch"), nb::arg("num_sparse"),
      nb::arg("dim"), nb::arg("grad_dense"), nb::arg("grad_sparse"), nb::arg("num_threads"));
}

}  // namespace shoal
