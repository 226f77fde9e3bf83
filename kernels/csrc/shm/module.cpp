#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "shm/boxes.h"
#include "shm/dense_sum.h"
#include "shm/frame.h"

namespace nb = nanobind;

namespace {

using Int64s = nb::ndarray<int64_t, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

struct Sections {
  const int64_t* data;
  int64_t* mutable_data;
  int64_t count;
  int64_t world;
};

Sections sections_of(const Int64s& sections) {
  require(sections.ndim() == 2, "sections must be int64 [S, W]");
  return {sections.data(), sections.data(), static_cast<int64_t>(sections.shape(0)), static_cast<int64_t>(sections.shape(1))};
}

shoal::FramePrefix prefix_of(const Bytes& prefix) {
  require(prefix.size() == sizeof(shoal::FramePrefix), "a prefix is 64 bytes");
  shoal::FramePrefix p;
  std::memcpy(&p, prefix.data(), sizeof p);
  return p;
}

void bind_frames(nb::module_& m) {
  m.def("frame_layout", [](Int64s sections, Int64s offsets, Int64s sizes) {
    const Sections s = sections_of(sections);
    require(offsets.size() == sections.size() && sizes.size() == sections.shape(1), "offsets [S, W], sizes [W]");
    shoal::frame_layout(s.data, s.count, s.world, offsets.data(), sizes.data());
  });
  m.def("frame_write", [](Bytes prefix, Int64s bases, Int64s sections, Int64s sizes) {
    const Sections s = sections_of(sections);
    require(bases.size() == sections.shape(1) && sizes.size() == sections.shape(1), "bases [W], sizes [W]");
    shoal::frame_write(prefix_of(prefix), bases.data(), s.data, s.count, s.world, sizes.data());
  });
  m.def("frame_check", [](Bytes prefix, Int64s bases, Int64s sections, Int64s sizes, Int64s statuses, Int64s applied) {
    const Sections s = sections_of(sections);
    const size_t w = sections.shape(1);
    require(bases.size() == w && sizes.size() == w && statuses.size() == w && applied.size() == w, "all are [W]");
    const shoal::FrameFault f = shoal::frame_check(prefix_of(prefix), bases.data(), s.data, s.count, s.world,
                                                   sizes.data(), statuses.data(), applied.data());
    return nb::make_tuple(f.rank, f.field, f.got, f.expected);
  });
  m.def("header_write", [](Int64s bases, Bytes header, int64_t sections_offset, Int64s sections) {
    const Sections s = sections_of(sections);
    require(bases.size() == sections.shape(1), "bases [W]");
    require(sections_offset >= 0 && sections_offset + 8 * s.count <= static_cast<int64_t>(header.size()),
            "the sections lie inside the header");
    shoal::header_write(bases.data(), header.data(), static_cast<int64_t>(header.size()), sections_offset, s.data,
                        s.count, s.world);
  });
  m.def("header_read", [](Int64s addresses, int64_t section_bytes_max, Int64s out, Int64s sections) {
    const Sections s = sections_of(sections);
    require(addresses.size() == sections.shape(1), "addresses [W], sections [S, W]");
    require(out.size() == addresses.size() * static_cast<size_t>(shoal::HeaderLayout::kWords), "out is int64 [W, 64]");
    require(s.count <= shoal::HeaderLayout::kSectionsMax, "a header has eight sections at most");
    const shoal::HeaderSummary h =
        shoal::header_read(addresses.data(), s.world, s.count, section_bytes_max, out.data(), s.mutable_data);
    return nb::make_tuple(h.is_agreed, h.has_bad_sections, h.applied_min, h.acked_min, h.flags, h.denominator);
  });
}

void bind_dense(nb::module_& m) {
  m.def("sum_in_order", [](Int64s sources, int64_t n, uintptr_t out) {
    nb::gil_scoped_release release;
    shoal::sum_in_order(sources.data(), static_cast<int64_t>(sources.size()), n, reinterpret_cast<float*>(out));
  });
  m.def("scatter_copy", [](uintptr_t from, Int64s offsets, Int64s bytes, Int64s addresses) {
    require(offsets.size() == bytes.size() && offsets.size() == addresses.size(), "all have one length");
    nb::gil_scoped_release release;
    shoal::scatter_copy(reinterpret_cast<const void*>(from), offsets.data(), bytes.data(),
                        static_cast<int64_t>(bytes.size()), addresses.data());
  });
  m.def("gather_copy", [](Int64s addresses, Int64s bytes, Int64s offsets, uintptr_t to) {
    require(offsets.size() == bytes.size() && offsets.size() == addresses.size(), "all have one length");
    nb::gil_scoped_release release;
    shoal::gather_copy(addresses.data(), bytes.data(), offsets.data(), static_cast<int64_t>(bytes.size()),
                       reinterpret_cast<void*>(to));
  });
}

// (fault, cause, rank, missing ranks, text), or None when all went well.
nb::object outcome_of(const shoal::BoxOutcome& outcome) {
  if (outcome.fault == shoal::BoxFault::kNone) return nb::none();
  nb::list missing;
  for (int rank : outcome.missing) missing.append(rank);
  return nb::make_tuple(static_cast<int>(outcome.fault), static_cast<int>(outcome.cause), outcome.rank, missing,
                        outcome.text);
}

void bind_boxes(nb::module_& m) {
  // Of its own C++ type: all nanobind modules of a process share one list of translators, so one for
  // std::runtime_error would also rename the errors of the other modules.
  nb::exception<shoal::ShmCapacityError>(m, "ShmCapacityError", PyExc_RuntimeError);
  nb::class_<shoal::Boxes>(m, "Boxes")
      .def(nb::init<std::string, int, int, double, double>(), nb::call_guard<nb::gil_scoped_release>())
      .def("send_buffers",
           [](shoal::Boxes& boxes, Int64s sizes, Int64s addresses) {
             require(sizes.size() == addresses.size(), "sizes [W], addresses [W]");
             nb::gil_scoped_release release;
             boxes.send_buffers(sizes.data(), addresses.data());
           })
      .def("exchange",
           [](shoal::Boxes& boxes, Int64s sizes, double timeout_s, Int64s addresses) {
             require(sizes.size() == addresses.size(), "sizes [W], addresses [W]");
             shoal::BoxOutcome outcome;
             {
               nb::gil_scoped_release release;
               outcome = boxes.exchange(sizes.data(), timeout_s, addresses.data());
             }
             return outcome_of(outcome);
           })
      .def("abort", [](shoal::Boxes& boxes, int kind,
                       const std::string& text) { boxes.abort(static_cast<shoal::BoxFault>(kind), text); })
      .def("aborted", [](const shoal::Boxes& boxes) { return outcome_of(boxes.aborted()); })
      .def_prop_ro("segment_bytes", &shoal::Boxes::segment_bytes);
  m.def("shm_free_bytes", &shoal::shm_free_bytes);
  m.def("sweep_segments", &shoal::sweep_segments);
}

}  // namespace

NB_MODULE(_shm, m) {
  m.doc() = "Frames of exchanges, ordered sums, and the shared-memory transport.";
  bind_frames(m);
  bind_dense(m);
  bind_boxes(m);
}
