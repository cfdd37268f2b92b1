#include "update_kernel.inc"

extern const Kernels kAvx2Kernels = {"avx2", update_range, sum_squares_range};
