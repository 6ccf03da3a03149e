// step.cu, compiled by the host compiler: the CPU backend.
#include "step.cu"
