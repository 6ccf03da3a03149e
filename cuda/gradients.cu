// The translation unit of the kernels in gradients.cuh, one for all dtypes; gradients.cpp compiles
// it for the CPU backend. No torch header may be included here.
#if !defined(__CUDACC__)
#include "host.h"
#endif
#include "gradients.cuh"

extern "C" __attribute__((visibility("default"))) const fusedopt::GradientKernels*
fusedopt_gradient_kernels() {
  return &fusedopt::kGradientKernels;
}
