#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "arrow/convert.h"

namespace nb = nanobind;

namespace shoal {
namespace {

template <class T>
struct Owned {
  T* data;
  size_t bytes;
};

// Hands a buffer to numpy; it returns to the pool when the last view of it dies.
template <class T>
nb::object to_numpy(Buffer<T>& buffer, std::initializer_list<size_t> shape) {
  const size_t bytes = buffer.bytes();
  auto* owned = new Owned<T>{buffer.release(), bytes};
  nb::capsule owner(owned, [](void* p) noexcept {
    auto* o = static_cast<Owned<T>*>(p);
    BufferPool::instance().give_back(o->data, o->bytes);
    delete o;
  });
  return nb::cast(nb::ndarray<nb::numpy, T>(owned->data, shape, owner));
}

// The record batches of an Arrow stream, held in place until the table dies.
class Table {
 public:
  explicit Table(nb::handle capsule) {
    void* pointer = PyCapsule_GetPointer(capsule.ptr(), "arrow_array_stream");
    if (pointer == nullptr) throw nb::python_error();
    auto* stream = static_cast<ArrowArrayStream*>(pointer);
    if (stream->release == nullptr) throw std::invalid_argument("the Arrow stream was already consumed");
    nb::gil_scoped_release release;
    for (;;) {
      ArrowArray batch;
      std::memset(&batch, 0, sizeof batch);
      if (stream->get_next(stream, &batch) != 0) {
        const char* message = stream->get_last_error(stream);
        const std::string text = message != nullptr ? message : "reading the Arrow stream failed";
        release_all();
        throw std::runtime_error(text);
      }
      if (batch.release == nullptr) return;
      num_rows_ += batch.length;
      batches_.push_back(batch);
    }
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  ~Table() { release_all(); }

  int64_t num_rows() const { return num_rows_; }

  // Appends rows [start, stop), one chunk per record batch they touch.
  void append_chunks(int64_t start, int64_t stop, std::vector<Chunk>* chunks) const {
    if (start < 0 || stop > num_rows_ || start > stop) throw std::out_of_range("rows outside the table");
    int64_t first = 0;
    for (const ArrowArray& batch : batches_) {
      const int64_t begin = std::max(start, first), end = std::min(stop, first + batch.length);
      if (begin < end) chunks->push_back({&batch, begin - first, end - begin});
      first += batch.length;
    }
  }

 private:
  void release_all() {
    for (ArrowArray& batch : batches_) batch.release(&batch);
    batches_.clear();
  }

  std::vector<ArrowArray> batches_;
  int64_t num_rows_ = 0;
};

nb::object convert(const Converter& converter, nb::list parts) {
  std::vector<Chunk> chunks;
  for (nb::handle item : parts) {
    nb::tuple part = nb::cast<nb::tuple>(item);
    nb::cast<const Table&>(part[0]).append_chunks(nb::cast<int64_t>(part[1]), nb::cast<int64_t>(part[2]), &chunks);
  }
  std::unique_ptr<BatchArrays> out;
  {
    nb::gil_scoped_release release;
    out = converter.convert(chunks);
  }
  const auto rows = static_cast<size_t>(out->num_rows);
  const auto features = static_cast<size_t>(converter.num_features());
  const auto specs = static_cast<size_t>(converter.num_specs());
  nb::list failures;
  for (const Failure& f : out->failures) {
    failures.append(nb::make_tuple(f.column, static_cast<int>(f.kind), f.row, f.value, f.expected));
  }
  Buffer<int64_t> counts(out->counts.size());
  std::memcpy(counts.data(), out->counts.data(), out->counts.size() * sizeof(int64_t));
  const auto values = static_cast<size_t>(out->num_values);
  return nb::make_tuple(
      to_numpy(out->values, {values}), to_numpy(out->offsets, {features * rows + 1}),
      converter.is_weighted() ? to_numpy(out->weights, {values}) : nb::none(),
      to_numpy(out->dense, {rows, static_cast<size_t>(converter.num_dense())}), to_numpy(out->labels, {rows}),
      converter.has_sample_weights() ? to_numpy(out->sample_weights, {rows}) : nb::none(),
      to_numpy(out->extras, {static_cast<size_t>(converter.num_extras()), rows}),
      to_numpy(counts, {specs, static_cast<size_t>(kNumCounters)}), failures);
}

auto bind_schema(Converter& converter, nb::handle capsule) {
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), "arrow_schema");
  if (pointer == nullptr) throw nb::python_error();
  return converter.bind(*static_cast<ArrowSchema*>(pointer));
}

}  // namespace
}  // namespace shoal

NB_MODULE(_arrow, m) {
  // Tables that daemon threads still hold when the interpreter ends are not worth a page of warnings.
  nanobind::set_leak_warnings(false);
  using namespace shoal;
  m.doc() = "Arrow columns to training batches over the Arrow C data interface";
  nb::class_<Converter>(m, "Converter")
      .def(
          "__init__",
          [](Converter* self, nb::list columns, bool labels_are_binary, bool missing_dense_is_zero,
             int64_t failures_max) {
            std::vector<ColumnSpec> specs;
            for (nb::handle item : columns) {
              nb::tuple c = nb::cast<nb::tuple>(item);
              ColumnSpec spec;
              spec.name = nb::cast<std::string>(c[0]);
              spec.role = static_cast<Role>(nb::cast<int>(c[1]));
              spec.kind = static_cast<IdKind>(nb::cast<int>(c[2]));
              spec.weights = nb::cast<std::string>(c[3]);
              spec.max_length = nb::cast<int64_t>(c[4]);
              spec.null_policy = static_cast<NullPolicy>(nb::cast<int>(c[5]));
              spec.oov_id = nb::cast<int64_t>(c[6]);
              specs.push_back(std::move(spec));
            }
            new (self) Converter(std::move(specs), {labels_are_binary, missing_dense_is_zero, failures_max});
          },
          nb::arg("columns"), nb::arg("labels_are_binary"), nb::arg("missing_dense_is_zero"), nb::arg("failures_max"))
      .def("bind", &bind_schema, nb::arg("schema"), "Problems of an Arrow schema as (column, sentence); [] if bound.")
      .def("convert", &convert, nb::arg("parts"), "The rows of [(table, start, stop), ...] as one training batch.");
  nb::class_<Table>(m, "Table")
      .def(nb::init<nb::handle>(), nb::arg("stream"), "Takes the record batches of an Arrow stream capsule.")
      .def_prop_ro("num_rows", &Table::num_rows);
  m.def(
      "xxh64",
      [](nb::bytes data, uint64_t seed) { return xxh64(data.c_str(), static_cast<uint64_t>(data.size()), seed); },
      nb::arg("data"), nb::arg("seed") = 0, "XXH64 of bytes.");
}
