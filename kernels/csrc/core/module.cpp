#include <nanobind/nanobind.h>

namespace shoal {
void bind_store(nanobind::module_& m);
void bind_step(nanobind::module_& m);
void bind_relay(nanobind::module_& m);
void bind_interaction(nanobind::module_& m);
}  // namespace shoal

NB_MODULE(_core, m) {
  m.doc() = "Shoal's data plane: row store, step kernels, interaction.";
  shoal::bind_store(m);
  shoal::bind_step(m);
  shoal::bind_relay(m);
  shoal::bind_interaction(m);
}
