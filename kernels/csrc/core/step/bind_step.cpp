// Python bindings of StepPlan and Lookup. Addresses are plain integers or int64 arrays; the GIL is released.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/step/apply.h"
#include "core/step/bind_arrays.h"
#include "core/step/held.h"
#include "core/step/lookup.h"
#include "core/step/mirrors.h"
#include "core/step/statistics.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

using namespace step;
template <class T>
std::vector<T*> pointers(const StepPlan& plan, const std::vector<uintptr_t>& addresses) {
  if (static_cast<int>(addresses.size()) != plan.num_outputs())
    throw std::invalid_argument("expected " + std::to_string(plan.num_outputs()) + " tensors, one per output");
  std::vector<T*> result;
  for (uintptr_t address : addresses) result.push_back(reinterpret_cast<T*>(address));
  return result;
}

// The lookup and what Python must be able to ask of its plan.
struct PyLookup {
  StepPlan* plan;
  Lookup lookup;
  explicit PyLookup(StepPlan* p) : plan(p), lookup(p) {}
};

nb::tuple route(PyLookup& self, uintptr_t values, bool values_are_wide, int64_t num_values, uintptr_t offsets,
                bool offsets_are_wide, int64_t num_offsets, uintptr_t weights, const Int32s& key_columns,
                int64_t batch_size, bool is_training) {
  if (static_cast<int>(key_columns.shape(0)) != self.plan->num_features())
    throw std::invalid_argument("key_columns needs one entry per feature of the plan");
  if (batch_size < 0 || batch_size > std::numeric_limits<int32_t>::max() || num_offsets < 1)
    throw std::invalid_argument("batch_size or offsets out of range");
  BatchView batch;
  batch.values = reinterpret_cast<const void*>(values);
  batch.values_are_wide = values_are_wide;
  batch.num_values = num_values;
  batch.offsets = reinterpret_cast<const void*>(offsets);
  batch.offsets_are_wide = offsets_are_wide;
  // Without samples any column is empty.
  batch.num_columns = batch_size ? (num_offsets - 1) / batch_size : std::numeric_limits<int32_t>::max();
  batch.weights = reinterpret_cast<const float*>(weights);
  batch.key_columns = key_columns.data();
  batch.batch_size = batch_size;
  RouteStatus status;
  {
    nb::gil_scoped_release release;
    status = self.lookup.route(batch, is_training);
  }
  return nb::make_tuple(status.status, status.bad_feature, status.bad_value, status.bad_position,
                        self.lookup.num_dropped(), self.lookup.num_remapped());
}

nb::dict counters(const PyLookup& self) {
  const int T = self.plan->num_tables();
  std::vector<int64_t> unique(T), served(T), ids(self.plan->world_size);
  self.lookup.table_loads(unique.data(), served.data());
  self.lookup.id_bytes(ids.data());
  auto sum = [](const std::vector<int64_t>& values) {
    int64_t total = 0;
    for (int64_t value : values) total += value;
    return total;
  };
  nb::dict result;
  result["num_ids"] = self.lookup.num_positions();
  result["num_unique"] = self.lookup.num_unique();
  result["num_dropped"] = self.lookup.num_dropped();
  result["num_remapped"] = self.lookup.num_remapped();
  result["id_bytes"] = sum(ids);
  result["row_bytes"] = sum(self.lookup.row_bytes_out());
  result["scratch_bytes"] = self.lookup.nbytes();
  result["table_unique"] = to_numpy(unique);
  result["table_served"] = to_numpy(served);
  result["feature_dropped"] = to_numpy(self.lookup.dropped());
  result["feature_remapped"] = to_numpy(self.lookup.remapped());
  return result;
}

void bind_plan(nb::module_& m) {
  nb::class_<StepPlan>(m, "StepPlan")
      .def(
          "__init__",
          [](StepPlan* self, RowStore* store, int rank, int world_size, int num_threads, const std::vector<int>& hosts) {
            if (num_threads < 1 || static_cast<uint32_t>(num_threads) > store->num_threads())
              throw std::invalid_argument("num_threads must be in [1, the store's num_threads]");
            if (!hosts.empty() && static_cast<int>(hosts.size()) != world_size)
              throw std::invalid_argument("one host per rank");
            new (self) StepPlan();
            self->hosts = hosts;
            self->store = store;
            self->rank = rank;
            self->world_size = world_size;
            self->threads = std::make_unique<Threads>(num_threads);
          },
          "store"_a, "rank"_a, "world_size"_a, "num_threads"_a, "hosts"_a, nb::keep_alive<1, 2>())
      .def("add_table",
           [](StepPlan& self, const std::vector<uint16_t>& owners, int leader, bool shares_statistic, int values_codec,
              int grads_codec, int flow) {
             const int index = self.num_tables();
             if (index >= static_cast<int>(self.store->num_tables())) throw std::invalid_argument("unknown table");
             const TableDesc& desc = self.store->table(index);
             if (owners.size() != size_t{1} << desc.log2_blocks) throw std::invalid_argument("one owner per row block");
             Table table;
             table.dim = static_cast<int>(desc.dim);
             table.type = desc.type;
             table.num_embeddings = static_cast<uint64_t>(desc.num_embeddings);
             table.log2_blocks = desc.log2_blocks;
             table.owners = owners;
             if (leader >= index) throw std::invalid_argument("column blocks follow the first of their table");
             table.leader = leader;
             self.has_column_blocks |= leader >= 0;
             table.shares_statistic = shares_statistic && desc.optimizer == OptimizerKind::ROWWISE_ADAGRAD;
             table.has_one_owner = std::all_of(owners.begin(), owners.end(),
                                               [&](uint16_t owner) { return owner == owners[0]; });
             table.is_wide = desc.num_embeddings == 0 || desc.num_embeddings > int64_t{1} << 31;
             for (int codec : {values_codec, grads_codec})
               if (codec < 0 || codec >= kNumCodecs) throw std::invalid_argument("no such codec");
             table.values_codec = static_cast<Codec>(values_codec);
             table.grads_codec = static_cast<Codec>(grads_codec);
             table.wire_row_bytes = encoded_bytes(table.values_codec, table.dim);
             table.wire_grad_bytes = encoded_bytes(table.grads_codec, table.dim);
             if (flow != 0) {
               table.is_pooled = self.has_pooled_flow = true;
               table.sums_by_owner = flow == 2;
               table.unit_bytes = std::exchange(table.wire_row_bytes, 0);
               table.bag_grad_bytes = std::exchange(table.wire_grad_bytes, 0);
             }
             self.tables.push_back(std::move(table));
           })
      .def("mirror",
           [](StepPlan& self, const std::vector<int>& tables) {
             for (int index : tables) {
               Table& table = self.tables.at(index);
               if (table.num_embeddings == 0) throw std::invalid_argument("a mirrored table has a fixed number of rows");
               table.is_mirrored = true;
               table.values_codec = Codec::kFp32;  // its values travel as they are
               table.wire_row_bytes = 0;
             }
             nb::gil_scoped_release release;
             self.mirrors = std::make_shared<Mirrors>(&self);
           })
      .def("touch_mirrors",
           [](StepPlan& self) {
             nb::gil_scoped_release release;
             self.mirrors->touch_all();
           })
      .def("mirror_bytes", [](const StepPlan& self) { return self.mirrors->bytes(); })
      .def("write_mirrors",
           [](StepPlan& self, const Int64s& destinations) {
             const int64_t* to = per_rank(self, destinations);
             nb::gil_scoped_release release;
             for (int p = 0; p < self.world_size; ++p)
               if (p != self.rank) self.mirrors->write(reinterpret_cast<std::byte*>(to[p]));
             self.mirrors->clear();
           })
      .def("read_mirrors",
           [](StepPlan& self, const Int64s& sources, const Int64s& bytes) {
             const int64_t* from = per_rank(self, sources);
             const int64_t* sizes = per_rank(self, bytes);
             nb::gil_scoped_release release;
             for (int p = 0; p < self.world_size; ++p)
               if (p != self.rank) self.mirrors->read(p, reinterpret_cast<const std::byte*>(from[p]), sizes[p]);
           })
      .def("add_output",
           [](StepPlan& self, int64_t width) {
             self.output_strides.push_back(width);
             self.pooled.emplace_back();
           })
      .def("add_feature",
           [](StepPlan& self, int table, int pooling, bool is_weighted, int policy, int output, int64_t column) {
             Feature feature;
             feature.table = table;
             feature.pooling = static_cast<Pooling>(pooling);
             feature.is_weighted = is_weighted;
             feature.policy = static_cast<IdPolicy>(policy);
             feature.output = output;
             feature.column = column;
             Table& owner = self.tables.at(table);
             feature.index_in_table = static_cast<int>(owner.features.size());
             owner.features.push_back(self.num_features());
             owner.has_scaled_features |= feature.is_scaled();
             owner.has_weighted_features |= feature.is_weighted;
             if (!feature.is_sequence()) self.pooled.at(output).push_back(self.num_features());
             self.features.push_back(feature);
           })
      .def("new_lookup", [](StepPlan& self) { return new PyLookup(&self); }, nb::rv_policy::take_ownership,
           nb::keep_alive<0, 1>())
      .def("apply", [](StepPlan& self, const std::vector<PyLookup*>& lookups, const Int64s& sources, uint32_t step,
                       const Floats& lrs) {
        if (sources.shape(0) != lookups.size() * self.world_size || static_cast<int>(lrs.shape(0)) != self.num_tables())
          throw std::invalid_argument("apply: sources or learning rates have the wrong length");
        std::vector<Lookup*> natives;
        for (PyLookup* lookup : lookups) natives.push_back(&lookup->lookup);
        nb::gil_scoped_release release;
        Updater(&self, natives, sources.data()).apply(step, lrs.data());
      });
}

std::vector<Lookup*> natives(const std::vector<PyLookup*>& lookups) {
  std::vector<Lookup*> result;
  for (PyLookup* lookup : lookups) result.push_back(&lookup->lookup);
  return result;
}

// The sum of squares as four floats of 32 bits each, low ones first: sums of those over ranks are exact.
std::vector<double> chunks(unsigned __int128 value) {
  std::vector<double> result;
  for (int i = 0; i < 4; ++i, value >>= 32) result.push_back(static_cast<double>(static_cast<uint32_t>(value)));
  return result;
}

void bind_held(nb::module_& m) {
  nb::class_<HeldGradients>(m, "HeldGradients")
      .def(nb::init<StepPlan*>(), "plan"_a, nb::keep_alive<1, 2>())
      .def("collect",
           [](HeldGradients& self, StepPlan& plan, const std::vector<PyLookup*>& lookups, const Int64s& sources) {
             if (sources.shape(0) != lookups.size() * plan.world_size)
               throw std::invalid_argument("collect: sources have the wrong length");
             unsigned __int128 squares;
             {
               nb::gil_scoped_release release;
               Updater updater(&plan, natives(lookups), sources.data());
               self.collect(&updater);
               squares = self.squares();
             }
             return chunks(squares);
           })
      .def("scale",
           [](HeldGradients& self, float factor) {
             nb::gil_scoped_release release;
             self.scale(factor);
           })
      .def("apply", [](HeldGradients& self, StepPlan& plan, uint32_t step, const Floats& lrs) {
        if (static_cast<int>(lrs.shape(0)) != plan.num_tables())
          throw std::invalid_argument("apply: one learning rate per table");
        nb::gil_scoped_release release;
        self.apply(step, lrs.data());
      });
}

void bind_statistics(nb::module_& m) {
  struct PyStatistics {
    StepPlan* plan;
    SharedStatistics statistics;
    explicit PyStatistics(StepPlan* p) : plan(p), statistics(p) {}
  };
  nb::class_<PyStatistics>(m, "SharedStatistics")
      .def(
          "__init__", [](PyStatistics* self, StepPlan* plan) { new (self) PyStatistics(plan); }, "plan"_a,
          nb::keep_alive<1, 2>())
      .def("collect",
           [](PyStatistics& self, const std::vector<PyLookup*>& lookups, const Int64s& sources) {
             if (sources.shape(0) != lookups.size() * self.plan->world_size)
               throw std::invalid_argument("collect: sources have the wrong length");
             std::vector<int64_t> out(self.plan->world_size), in(self.plan->world_size);
             {
               nb::gil_scoped_release release;
               Updater updater(self.plan, natives(lookups), sources.data());
               self.statistics.collect(&updater, out.data(), in.data());
             }
             return nb::make_tuple(to_numpy(out), to_numpy(in));
           })
      .def("collect_held",
           [](PyStatistics& self, HeldGradients& held) {
             std::vector<int64_t> out(self.plan->world_size), in(self.plan->world_size);
             {
               nb::gil_scoped_release release;
               self.statistics.collect(&held, out.data(), in.data());
             }
             return nb::make_tuple(to_numpy(out), to_numpy(in));
           })
      .def("write",
           [](const PyStatistics& self, const Int64s& destinations) {
             const int64_t* to = per_rank(*self.plan, destinations);
             nb::gil_scoped_release release;
             self.statistics.write(to);
           })
      .def("apply", [](PyStatistics& self, const Int64s& sources, uint32_t step, const Floats& lrs) {
        const int64_t* from = per_rank(*self.plan, sources);
        if (static_cast<int>(lrs.shape(0)) != self.plan->num_tables())
          throw std::invalid_argument("apply: one learning rate per table");
        nb::gil_scoped_release release;
        self.statistics.apply(from, step, lrs.data());
      });
}

void bind_lookup(nb::module_& m) {
  nb::class_<PyLookup>(m, "Lookup")
      .def("route", &route)
      .def("id_bytes",
           [](const PyLookup& self) {
             std::vector<int64_t> bytes(self.plan->world_size);
             self.lookup.id_bytes(bytes.data());
             return to_numpy(bytes);
           })
      .def("write_ids",
           [](const PyLookup& self, const Int64s& destinations) {
             const int64_t* to = per_rank(*self.plan, destinations);
             nb::gil_scoped_release release;
             self.lookup.write_ids(to);
           })
      .def("straight_id_bytes",
           [](const PyLookup& self) {
             std::vector<int64_t> bytes(self.plan->world_size);
             self.lookup.straight_id_bytes(bytes.data());
             return to_numpy(bytes);
           })
      .def("write_straight_ids",
           [](const PyLookup& self, const Int64s& destinations) {
             const int64_t* to = per_rank(*self.plan, destinations);
             nb::gil_scoped_release release;
             self.lookup.write_straight_ids(to);
           })
      .def("resolve",
           [](PyLookup& self, const Int64s& sources, const Int64s& bytes) {
             const int64_t* from = per_rank(*self.plan, sources);
             const int64_t* sizes = per_rank(*self.plan, bytes);
             nb::gil_scoped_release release;
             self.lookup.resolve(from, sizes, nullptr, nullptr);
           })
      .def("resolve_with_straight",
           [](PyLookup& self, const Int64s& sources, const Int64s& bytes, const Int64s& straight,
              const Int64s& straight_bytes) {
             const int64_t* from = per_rank(*self.plan, sources);
             const int64_t* sizes = per_rank(*self.plan, bytes);
             const int64_t* more = per_rank(*self.plan, straight);
             const int64_t* more_sizes = per_rank(*self.plan, straight_bytes);
             nb::gil_scoped_release release;
             self.lookup.resolve(from, sizes, more, more_sizes);
           })
      .def("sum_bytes_in", [](const PyLookup& self) { return to_numpy(self.lookup.sum_bytes_in()); })
      .def("bag_grad_bytes_out", [](const PyLookup& self) { return to_numpy(self.lookup.bag_grad_bytes_out()); })
      .def("write_straight_grads",
           [](const PyLookup& self, const Int64s& destinations) {
             const int64_t* to = per_rank(*self.plan, destinations);
             nb::gil_scoped_release release;
             self.lookup.write_straight_grads(to);
           })
      .def("row_bytes_out", [](const PyLookup& self) { return to_numpy(self.lookup.row_bytes_out()); })
      .def("row_bytes_in", [](const PyLookup& self) { return to_numpy(self.lookup.row_bytes_in()); })
      .def("grad_bytes_out", [](const PyLookup& self) { return to_numpy(self.lookup.grad_bytes_out()); })
      .def("grad_bytes_in", [](const PyLookup& self) { return to_numpy(self.lookup.grad_bytes_in()); })
      .def("write_rows",
           [](const PyLookup& self, const Int64s& destinations) {
             const int64_t* to = per_rank(*self.plan, destinations);
             nb::gil_scoped_release release;
             self.lookup.write_rows(to);
           })
      .def("feature_counts", [](const PyLookup& self) { return to_numpy(self.lookup.feature_counts()); })
      .def("pool",
           [](PyLookup& self, const Int64s& sources, const Int64s& sums, const std::vector<uintptr_t>& outputs) {
             const int64_t* from = per_rank(*self.plan, sources);
             const int64_t* straight = per_rank(*self.plan, sums);
             const auto to = pointers<float>(*self.plan, outputs);
             nb::gil_scoped_release release;
             self.lookup.pool(from, straight, to.data());
           })
      .def("segment_sum",
           [](PyLookup& self, const std::vector<uintptr_t>& grads, const Int64s& destinations) {
             const auto from = pointers<const float>(*self.plan, grads);
             const int64_t* to = per_rank(*self.plan, destinations);
             nb::gil_scoped_release release;
             self.lookup.segment_sum(from.data(), to);
           })
      .def("write_sums",
           [](const PyLookup& self, const Int64s& destinations) {
             const int64_t* to = per_rank(*self.plan, destinations);
             nb::gil_scoped_release release;
             self.lookup.write_sums(to);
           })
      .def("weight_grad",
           [](PyLookup& self, const std::vector<uintptr_t>& grads, uintptr_t out) {
             const auto from = pointers<const float>(*self.plan, grads);
             nb::gil_scoped_release release;
             self.lookup.weight_grad(from.data(), reinterpret_cast<float*>(out));
           })
      .def("flow_counts",
           [](const PyLookup& self) {
             std::vector<int64_t> counts(4 * static_cast<size_t>(self.plan->num_tables()));
             {
               nb::gil_scoped_release release;
               self.lookup.flow_counts(counts.data());
             }
             return to_numpy(counts);
           })
      .def("counters", &counters);
}

}  // namespace

static void bind_codec(nb::module_& m) {
  m.def("encoded_bytes", [](int codec, int64_t dim) { return encoded_bytes(static_cast<Codec>(codec), dim); });
  m.def("encode_rows", [](int codec, uintptr_t rows, int64_t count, int dim, uintptr_t out) {
    const int64_t bytes = encoded_bytes(static_cast<Codec>(codec), dim);
    for (int64_t i = 0; i < count; ++i)
      encode_wire(static_cast<Codec>(codec), reinterpret_cast<const float*>(rows) + i * dim, dim,
                  reinterpret_cast<std::byte*>(out) + i * bytes);
  });
  m.def("decode_rows", [](int codec, uintptr_t in, int64_t count, int dim, uintptr_t rows) {
    const int64_t bytes = encoded_bytes(static_cast<Codec>(codec), dim);
    for (int64_t i = 0; i < count; ++i)
      decode_wire(static_cast<Codec>(codec), reinterpret_cast<const std::byte*>(in) + i * bytes, dim,
                  reinterpret_cast<float*>(rows) + i * dim);
  });
}

void bind_step(nb::module_& m) {
  static PyObject* violation = nb::exception<ProtocolViolation>(m, "ProtocolViolation", PyExc_RuntimeError).ptr();
  (void)violation;
  bind_plan(m);
  bind_held(m);
  bind_statistics(m);
  bind_lookup(m);
  bind_codec(m);
}

}  // namespace shoal
