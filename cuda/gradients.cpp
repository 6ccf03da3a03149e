// gradients.cu, compiled by the host compiler: the CPU backend.
#include "gradients.cu"
