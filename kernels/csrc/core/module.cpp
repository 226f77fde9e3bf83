#include <nanobind/nanobind.h>

NB_MODULE(_core, m) { m.doc() = "Shoal's data plane: row store, step kernels, interaction."; }
