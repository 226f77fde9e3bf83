// Python bindings of the store. Arrays come as raw addresses (kernels/rowstore.py checks shapes and types first).
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "core/store/crc32c.h"
#include "core/store/cut.h"
#include "core/store/packed.h"
#include "core/store/rowstore.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

template <typename T>
T* address(uint64_t value) {
  return reinterpret_cast<T*>(value);
}

RowColumns columns(uint64_t ids, uint64_t weights, uint64_t slots, uint64_t last_step, uint64_t count) {
  return {address<int64_t>(ids), address<std::byte>(weights), address<float>(slots), address<int64_t>(last_step),
          address<int64_t>(count)};
}

// Update rows from Python, for tests and tools; the step's hot path is in core/step.
void apply(RowStore& store, uint32_t table, uint64_t ids_address, int64_t n, uint64_t gradients, uint32_t step,
           float lr) {
  std::vector<uint32_t> slots(static_cast<size_t>(n));
  store.begin_step(step);
  if (store.resolve(table, address<int64_t>(ids_address), n, slots.data(), true) >= 0) {
    throw std::invalid_argument("an id belongs to a block that is not owned");
  }
  const TableDesc& desc = store.table(table);
  const float* rows = address<float>(gradients);
  with_updater(store, table, make_scalars(desc, step, lr), 0, [&](auto&& updater) {
    for (int64_t i = 0; i < n; ++i) {
      if (i + 8 < n) updater.prefetch(slots[i + 8]);
      updater.update(slots[i], rows + i * desc.dim);
    }
  });
}

void bind_table(nb::module_& m) {
  nb::class_<TableDesc>(m, "TableDesc")
      .def(
          "__init__",
          [](TableDesc* self, const std::string& name, int64_t num_embeddings, uint32_t dim, int type, int optimizer,
             int decay_mode, float eps, double beta1, double beta2, float weight_decay, float initial_accumulator,
             uint64_t seed, double init_min, double init_max, uint32_t log2_blocks, uint32_t first_column,
             uint32_t logical_dim) {
            new (self) TableDesc();
            self->name = name;
            self->num_embeddings = num_embeddings;
            self->dim = dim;
            self->type = static_cast<RowType>(type);
            self->optimizer = static_cast<OptimizerKind>(optimizer);
            self->decay_mode = static_cast<WeightDecayMode>(decay_mode);
            self->eps = eps;
            self->beta1 = beta1;
            self->beta2 = beta2;
            self->weight_decay = weight_decay;
            self->initial_accumulator = initial_accumulator;
            self->seed = seed;
            self->init = make_init_range(init_min, init_max);
            self->log2_blocks = log2_blocks;
            self->first_column = first_column;
            self->logical_dim = logical_dim;
          },
          nb::kw_only(), "name"_a, "num_embeddings"_a, "dim"_a, "type"_a, "optimizer"_a, "decay_mode"_a, "eps"_a,
          "beta1"_a, "beta2"_a, "weight_decay"_a, "initial_accumulator"_a, "seed"_a, "init_min"_a, "init_max"_a,
          "log2_blocks"_a, "first_column"_a, "logical_dim"_a)
      .def_ro("name", &TableDesc::name)
      .def_ro("dim", &TableDesc::dim);
  m.def(
      "initial_rows",
      [](const TableDesc& table, uint64_t ids, int64_t n, uint64_t out) {
        nb::gil_scoped_release release;
        for (int64_t i = 0; i < n; ++i) initial_row(table, address<int64_t>(ids)[i], address<float>(out) + i * table.dim);
      },
      "table"_a, "ids"_a, "n"_a, "out"_a);
}

void bind_versions(nb::module_& m) {
  nb::class_<Cut>(m, "Cut")
      .def(nb::init<RowStore&>(), nb::keep_alive<1, 2>(), "store"_a)
      .def("release", &Cut::release, nb::call_guard<nb::gil_scoped_release>())
      .def("roll_back", &Cut::roll_back, nb::call_guard<nb::gil_scoped_release>(), "step"_a)
      .def("num_changed", &Cut::num_changed, nb::call_guard<nb::gil_scoped_release>(), "since"_a);
  nb::class_<BlockExport>(m, "BlockExport")
      .def(
          "__init__",
          [](BlockExport* self, RowStore& store, Cut* cut, uint32_t table, uint32_t block) {
            nb::gil_scoped_release release;
            new (self) BlockExport(store, cut, table, block);
          },
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), "store"_a, "cut"_a.none(), "table"_a, "block"_a)
      .def_prop_ro("num_rows", &BlockExport::num_rows)
      .def(
          "fill",
          [](BlockExport& self, uint64_t ids, uint64_t weights, uint64_t slots, uint64_t last_step, uint64_t count) {
            nb::gil_scoped_release release;
            self.fill(columns(ids, weights, slots, last_step, count));
          },
          "ids"_a, "weights"_a, "slots"_a, "last_step"_a, "count"_a);
}

void bind_packed(nb::module_& m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<ChangePack>(m, "ChangePack")
      .def(
          "__init__",
          [](ChangePack* self, Cut& cut, Cut& since, std::vector<ChangePack::Key> keys, int64_t origin) {
            nb::gil_scoped_release release;
            new (self) ChangePack(cut, since, std::move(keys), origin);
          },
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), "cut"_a, "since"_a, "keys"_a, "origin"_a)
      .def(
          "fill",
          [](ChangePack& self, uint64_t to, size_t capacity) { return self.fill(address<std::byte>(to), capacity); },
          no_gil, "to"_a, "capacity"_a)
      .def_prop_ro("is_done", &ChangePack::is_done)
      .def_prop_ro("num_sections", &ChangePack::num_sections)
      .def_prop_ro("num_changes", &ChangePack::num_changes)
      .def_prop_ro("checksum_deltas", &ChangePack::checksum_deltas)
      .def_prop_ro("bytes_max", &ChangePack::bytes_max);
  nb::class_<BlockPack>(m, "BlockPack")
      .def(
          "__init__",
          [](BlockPack* self, RowStore& store, Cut* cut, uint32_t table, uint32_t block) {
            nb::gil_scoped_release release;
            new (self) BlockPack(store, cut, table, block);
          },
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), "store"_a, "cut"_a.none(), "table"_a, "block"_a)
      .def(
          "fill",
          [](BlockPack& self, uint64_t to, size_t capacity) { return self.fill(address<std::byte>(to), capacity); },
          no_gil, "to"_a, "capacity"_a)
      .def_prop_ro("is_done", &BlockPack::is_done)
      .def_prop_ro("num_rows", &BlockPack::num_rows)
      .def_prop_ro("checksum", &BlockPack::checksum);
  m.def(
      "crc32c", [](uint32_t crc, uint64_t data, size_t size) { return crc32c(crc, address<std::byte>(data), size); },
      no_gil, "crc"_a, "data"_a, "size"_a);
  m.def(
      "crc32c_quarters", [](uint64_t data, size_t size) { return crc32c_quarters(address<std::byte>(data), size); },
      no_gil, "data"_a, "size"_a);
}

// Apply several sections: int64 [n, 6] of table, block, rows, deleted ids, address, and the change of the checksum,
// which is filled in. Sections that do not fit change nothing; returns their numbers and why.
std::vector<std::pair<int64_t, std::string>> apply_sections(RowStore& store, uint64_t list, int64_t n) {
  std::vector<std::pair<int64_t, std::string>> failed;
  for (int64_t i = 0; i < n; ++i) {
    int64_t* s = address<int64_t>(list) + 6 * i;
    try {
      const std::byte* packed = address<std::byte>(static_cast<uint64_t>(s[4]));
      s[5] = static_cast<int64_t>(store.apply_packed(static_cast<uint32_t>(s[0]), static_cast<uint32_t>(s[1]), packed,
                                                     s[2], s[3]));
    } catch (const std::exception& error) {
      failed.emplace_back(i, error.what());
    }
  }
  return failed;
}

// Blocks, and rows that come from elsewhere.
void bind_blocks(nb::class_<RowStore>& store) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  store.def("add_block", &RowStore::add_block, no_gil, "table"_a, "block"_a, "is_replica"_a)
      .def("set_replica", &RowStore::set_replica, no_gil, "table"_a, "block"_a, "is_replica"_a)
      .def("drop_block", &RowStore::drop_block, no_gil, "table"_a, "block"_a)
      .def("owns", &RowStore::owns, no_gil, "table"_a, "block"_a)
      .def("is_replica", &RowStore::is_replica, no_gil, "table"_a, "block"_a)
      .def("num_rows", nb::overload_cast<uint32_t, bool>(&RowStore::num_rows, nb::const_), no_gil, "table"_a,
           "in_replicas"_a)
      .def("num_block_rows", nb::overload_cast<uint32_t, uint32_t, bool>(&RowStore::num_rows, nb::const_), no_gil,
           "table"_a, "block"_a, "in_replicas"_a)
      .def("block_checksum", &RowStore::block_checksum, no_gil, "table"_a, "block"_a)
      .def(
          "import_rows",
          [](RowStore& self, uint32_t table, uint32_t block, int64_t n, uint64_t ids, uint64_t weights, uint64_t slots,
             uint64_t last_step, uint64_t count, bool replace) {
            self.import_rows(table, block, columns(ids, weights, slots, last_step, count), n, replace);
          },
          no_gil, "table"_a, "block"_a, "n"_a, "ids"_a, "weights"_a, "slots"_a, "last_step"_a, "count"_a, "replace"_a)
      .def(
          "import_packed",
          [](RowStore& self, uint32_t table, uint32_t block, uint64_t packed, int64_t n, bool replace, int64_t expected) {
            return self.import_packed(table, block, address<std::byte>(packed), n, replace, expected);
          },
          no_gil, "table"_a, "block"_a, "packed"_a, "n"_a, "replace"_a, "expected"_a)
      .def("apply_sections", &apply_sections, no_gil, "sections"_a, "n"_a);
}

// The sum of the hashes of rows that come as columns.
uint64_t rows_checksum(int64_t n, uint64_t ids, uint64_t weights, uint64_t slots, uint64_t last_step, uint64_t count,
                       size_t weight_bytes, size_t slot_bytes) {
  const RowHasher hasher(slot_bytes, weight_bytes);
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += hasher.hash(address<int64_t>(ids)[i], address<int64_t>(last_step)[i], address<int64_t>(count)[i],
                       address<std::byte>(slots) + i * slot_bytes, address<std::byte>(weights) + i * weight_bytes);
  }
  return sum;
}

}  // namespace

void bind_store(nb::module_& m) {
  bind_table(m);
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<RowStore> store(m, "RowStore");
  store
      .def(
          "__init__",
          [](RowStore* self, const std::vector<const TableDesc*>& tables, uint32_t num_threads, uint32_t undo_steps) {
            std::vector<TableDesc> copies;
            for (const TableDesc* table : tables) copies.push_back(*table);
            new (self) RowStore(std::move(copies), num_threads, undo_steps);
          },
          "tables"_a, "num_threads"_a, "undo_steps"_a)
      .def(
          "resolve",
          [](RowStore& self, uint32_t table, uint64_t ids, int64_t n, uint64_t slots, bool reserve) {
            return self.resolve(table, address<int64_t>(ids), n, address<uint32_t>(slots), reserve);
          },
          no_gil, "table"_a, "ids"_a, "n"_a, "slots"_a, "reserve"_a)
      .def(
          "lookup",
          [](RowStore& self, uint32_t table, uint64_t ids, int64_t n, uint64_t out) {
            return self.lookup(table, address<int64_t>(ids), n, address<float>(out));
          },
          no_gil, "table"_a, "ids"_a, "n"_a, "out"_a)
      .def(
          "erase",
          [](RowStore& self, uint32_t table, uint64_t ids, int64_t n) {
            return self.erase(table, address<int64_t>(ids), n);
          },
          no_gil, "table"_a, "ids"_a, "n"_a)
      .def("apply", &apply, no_gil, "table"_a, "ids"_a, "n"_a, "gradients"_a, "step"_a, "lr"_a)
      .def("discard_reservations", nb::overload_cast<>(&RowStore::discard_reservations), no_gil)
      .def("begin_step", &RowStore::begin_step, no_gil, "step"_a)
      .def("commit", &RowStore::commit, no_gil, "step"_a)
      .def("undo", &RowStore::undo, no_gil, "step"_a)
      .def_prop_ro("step", &RowStore::step)
      .def("version_bytes", &RowStore::version_bytes)
      .def("arena_bytes", &RowStore::arena_bytes)
      .def("id_map_bytes", &RowStore::id_map_bytes);
  bind_blocks(store);
  bind_versions(m);
  bind_packed(m);
  m.def("rows_checksum", &rows_checksum, no_gil, "n"_a, "ids"_a, "weights"_a, "slots"_a, "last_step"_a, "count"_a,
        "weight_bytes"_a, "slot_bytes"_a);
}

}  // namespace shoal
