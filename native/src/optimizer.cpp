#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace {

// Fits the caches of a core together with both moments; a fixed size keeps sums independent of the number of threads.
constexpr uint64_t kChunk = 1 << 16;

// The best that the processor has, or the one that SPILLWAY_KERNEL names where it has it.
const Kernels& chosen() {
  const char* name = std::getenv("SPILLWAY_KERNEL");
  const auto is_wanted = [&](const Kernels& kernels) { return name == nullptr || std::strcmp(name, kernels.name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && is_wanted(kAvx512Kernels)) return kAvx512Kernels;
  if (avx2 && is_wanted(kAvx2Kernels)) return kAvx2Kernels;
#endif
  return kPortableKernels;
}

const Kernels& kernels() {
  static const Kernels& found = chosen();
  return found;
}

}  // namespace

int32_t spillway_abi_version() { return 5; }

const char* spillway_kernel_name() { return kernels().name; }

int32_t spillway_update(const spillway_update_args* args, int32_t threads) {
  const spillway_update_args& a = *args;
  const bool split = a.weight_type == SPILLWAY_BFLOAT16, beside = a.weight_type == SPILLWAY_FLOAT16;
  const bool narrow = a.moment_type == SPILLWAY_8BIT;
  const bool known = a.rule >= SPILLWAY_ADAMW && a.rule <= SPILLWAY_SGD &&
                     (split || beside || a.weight_type == SPILLWAY_FLOAT32) &&
                     a.grad_type >= SPILLWAY_FLOAT32 && a.grad_type <= SPILLWAY_FLOAT16 &&
                     (a.moment_type == SPILLWAY_FLOAT32 || a.moment_type == SPILLWAY_BFLOAT16 || narrow);
  if (!known) return -EINVAL;
  if (a.moment_type != SPILLWAY_FLOAT32 && a.grad_type != SPILLWAY_FLOAT32 && a.grad_type != a.weight_type)
    return -EINVAL;
  if (a.n != 0 && (((split || beside) && a.low == nullptr) || (split && a.low_bits != 16 && a.low_bits != 8) ||
                   a.m == nullptr ||
                   (a.rule == SPILLWAY_ADAMW && a.v == nullptr) || (narrow && (a.scales == nullptr || a.n % 64 != 0))))
    return -EINVAL;
  ThreadPool::shared().run((a.n + kChunk - 1) / kChunk, threads, [&](uint64_t chunk) {
    kernels().update(a, chunk * kChunk, std::min(a.n, (chunk + 1) * kChunk));
  });
  return 0;
}

double spillway_sum_squares(const void* values, int32_t type, uint64_t n, int32_t threads) {
  std::vector<double> partial((n + kChunk - 1) / kChunk);
  ThreadPool::shared().run(partial.size(), threads, [&](uint64_t chunk) {
    partial[chunk] = kernels().sum_squares(values, type, chunk * kChunk, std::min(n, (chunk + 1) * kChunk));
  });
  double total = 0;
  for (double part : partial) total += part;
  return total;
}
