#include <nanobind/nanobind.h>

NB_MODULE(_arrow, m) { m.doc() = "Shoal native kernels: arrow"; }
