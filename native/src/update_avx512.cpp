#include "update_kernel.inc"

extern const Kernels kAvx512Kernels = {"avx512", update_range, sum_squares_range};
