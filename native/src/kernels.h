// One set of kernels per instruction set; optimizer.cpp picks one for the processor it runs on.
#pragma once
#include "spillway.h"

struct Kernels {
  const char* name;
  void (*update)(const spillway_update_args&, uint64_t begin, uint64_t end);
  double (*sum_squares)(const void* values, int32_t type, uint64_t begin, uint64_t end);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif
