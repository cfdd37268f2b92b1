#include "update_kernel.inc"

#if defined(__aarch64__)
static const char* const kName = "neon";  // part of every 64-bit ARM, so the compiler uses it by itself
#else
static const char* const kName = "portable";
#endif

extern const Kernels kPortableKernels = {kName, update_range, sum_squares_range};
