// Python bindings of Relay.
#include <nanobind/stl/vector.h>

#include "core/step/bind_arrays.h"
#include "core/step/relay.h"

namespace shoal {

void bind_relay(nanobind::module_& m) {
  namespace nb = nanobind;
  using namespace nb::literals;
  using namespace step;
  // What Python must be able to ask of the relay's plan.
  struct PyRelay {
    StepPlan* plan;
    size_t num_locals;
    Relay relay;
    PyRelay(StepPlan* p, std::vector<int> owners, std::vector<int> locals)
        : plan(p), num_locals(locals.size()), relay(p, std::move(owners), std::move(locals)) {}
    const int64_t* per_local(const Int64s& array) const {
      if (array.shape(0) != num_locals) throw std::invalid_argument("expected one entry per rank of this host");
      return array.data();
    }
  };
  nb::class_<PyRelay>(m, "Relay")
      .def(
          "__init__",
          [](PyRelay* self, StepPlan* plan, std::vector<int> owners, std::vector<int> locals) {
            new (self) PyRelay(plan, std::move(owners), std::move(locals));
          },
          "plan"_a, "owners"_a, "locals"_a, nb::keep_alive<1, 2>())
      .def("merge",
           [](PyRelay& self, const Int64s& sources, const Int64s& bytes) {
             const int64_t* from = self.per_local(sources);
             const int64_t* sizes = self.per_local(bytes);
             nb::gil_scoped_release release;
             self.relay.merge(from, sizes);
           })
      .def("id_bytes",
           [](const PyRelay& self) {
             std::vector<int64_t> bytes(self.plan->world_size);
             self.relay.id_bytes(bytes.data());
             return to_numpy(bytes);
           })
      .def("write_ids",
           [](const PyRelay& self, const Int64s& destinations) {
             const int64_t* to = per_rank(*self.plan, destinations);
             nb::gil_scoped_release release;
             self.relay.write_ids(to);
           })
      .def("row_bytes", [](const PyRelay& self) { return to_numpy(self.relay.row_bytes()); })
      .def("grad_bytes", [](const PyRelay& self) { return to_numpy(self.relay.grad_bytes()); })
      .def("local_row_bytes", [](const PyRelay& self) { return to_numpy(self.relay.local_row_bytes()); })
      .def("local_grad_bytes", [](const PyRelay& self) { return to_numpy(self.relay.local_grad_bytes()); })
      .def("hand_out",
           [](const PyRelay& self, const Int64s& sources, const Int64s& destinations) {
             const int64_t* from = per_rank(*self.plan, sources);
             const int64_t* to = self.per_local(destinations);
             nb::gil_scoped_release release;
             self.relay.hand_out(from, to);
           })
      .def("sum",
           [](const PyRelay& self, const Int64s& sources, const Int64s& destinations) {
             const int64_t* from = self.per_local(sources);
             const int64_t* to = per_rank(*self.plan, destinations);
             nb::gil_scoped_release release;
             self.relay.sum(from, to);
           })
      .def("counts", [](const PyRelay& self) { return nb::make_tuple(self.relay.num_asked(), self.relay.num_merged()); });
}

}  // namespace shoal
