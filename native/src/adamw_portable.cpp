#include "adamw_kernel.inc"

extern const Kernels kPortableKernels = {"portable", adamw_range, sum_squares_range};
