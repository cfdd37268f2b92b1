#include "adamw_kernel.inc"

extern const Kernels kAvx2Kernels = {"avx2", adamw_range, sum_squares_range};
