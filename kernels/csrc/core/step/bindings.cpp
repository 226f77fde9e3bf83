#include <nanobind/nanobind.h>

namespace shoal {
void bind_step(nanobind::module_&) {}
void bind_interaction(nanobind::module_&) {}
}  // namespace shoal
