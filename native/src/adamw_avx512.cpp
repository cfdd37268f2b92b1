#include "adamw_kernel.inc"

extern const Kernels kAvx512Kernels = {"avx512", adamw_range, sum_squares_range};
