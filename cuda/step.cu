// The translation unit of one kernel library, compiled once per signature (the -D flags below) for
// CUDA by nvcc, and as step.cpp for CPU threads. No torch header may be included here.
#include "multi_tensor.cuh"
#include "update_rules.cuh"
#if !defined(__CUDACC__)
#include "host.h"
#endif

namespace fusedopt {
namespace {

template <class... States>
using Compiled = Signature<FUSEDOPT_RULE, FUSEDOPT_PARAM, FUSEDOPT_GRAD, FUSEDOPT_MASTER,
                           FUSEDOPT_STOCHASTIC, States...>;

#if defined(FUSEDOPT_STATE2)
using ThisSignature = Compiled<FUSEDOPT_STATE0, FUSEDOPT_STATE1, FUSEDOPT_STATE2>;
#elif defined(FUSEDOPT_STATE1)
using ThisSignature = Compiled<FUSEDOPT_STATE0, FUSEDOPT_STATE1>;
#elif defined(FUSEDOPT_STATE0)
using ThisSignature = Compiled<FUSEDOPT_STATE0>;
#else
using ThisSignature = Compiled<>;
#endif

constexpr Kernels kKernels = make_kernels<ThisSignature>();

}  // namespace
}  // namespace fusedopt

extern "C" __attribute__((visibility("default"))) const fusedopt::Kernels* fusedopt_kernels() {
  return &fusedopt::kKernels;
}
