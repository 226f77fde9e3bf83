#include <nanobind/nanobind.h>

namespace shoal {
void bind_store(nanobind::module_& m);
void bind_step(nanobind::module_& m);
void bind_relay(nanobind::module_& m);
void bind_interaction(nanobind::module_& m);
}  // namespace shoal

namespace {

// What the compiler was allowed to use: it changes which operations are fused.
constexpr const char* kInstructions =
#if defined(__AVX512F__)
    "AVX-512"
#elif defined(__AVX2__) && defined(__FMA__)
    "AVX2 with FMA"
#elif defined(__AVX2__)
    "AVX2"
#elif defined(__aarch64__)
    "NEON"
#else
    "baseline"
#endif
    ;

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Shoal's data plane: row store, step kernels, interaction.";
  m.attr("COMPILER") = __VERSION__;
  m.attr("INSTRUCTIONS") = kInstructions;
  shoal::bind_store(m);
  shoal::bind_step(m);
  shoal::bind_relay(m);
  shoal::bind_interaction(m);
}
