#include <nanobind/nanobind.h>

NB_MODULE(_shm, m) { m.doc() = "Shoal native kernels: shm"; }
