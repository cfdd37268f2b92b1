/* The whole C ABI of the native part: disk I/O and optimizer arithmetic.
 *
 * No Python, PyTorch or CUDA header is used, so one build serves every Python and every PyTorch. Every function may be
 * called from any thread and blocks its caller only; failures come back as negative errno values. */
#pragma once
#include <stdint.h>

#if defined(__GNUC__)
#define SPILLWAY_API extern "C" __attribute__((visibility("default")))
#else
#define SPILLWAY_API extern "C"
#endif

/* Changes whenever a struct or a signature below does; the Python side refuses another number. */
SPILLWAY_API int32_t spillway_abi_version();

/* "avx512", "avx2" or "portable": the best kernel for this processor, or the lesser one that the environment variable
 * SPILLWAY_KERNEL names. All give the same bits. */
SPILLWAY_API const char* spillway_kernel_name();

/* ---- Disk ---- */

/* One contiguous transfer between a file and memory. offset, bytes and buffer must be 4096-aligned under O_DIRECT. */
typedef struct {
  int32_t fd;
  int32_t is_write;
  void* buffer;
  uint64_t offset;
  uint64_t bytes;
} spillway_transfer;

/* An engine runs one batch of transfers at a time. depth: requests in flight. use_uring 0 forces the thread pool. */
SPILLWAY_API void* spillway_io_open(uint32_t depth, int32_t use_uring);
SPILLWAY_API void spillway_io_close(void* engine);
/* "io_uring" or "threads". */
SPILLWAY_API const char* spillway_io_backend(void* engine);
/* Makes files and a range of memory known to the kernel once, so that transfers between them need no look-up and no
 * pinning each; in the place of what was registered before. No file and NULL for nothing at all. Memory must stay mapped
 * until then. 0, or -errno where the kernel refuses (a limit on locked memory): transfers work all the same. */
SPILLWAY_API int32_t spillway_io_register(void* engine, const int32_t* fds, uint32_t num_fds, void* memory,
                                          uint64_t bytes);
/* Runs all transfers, cut into blocks, to the end. 0, or -errno (end of file is -ENODATA) with *failed the index of the
 * transfer that failed; nothing is in flight when it returns. */
SPILLWAY_API int32_t spillway_io_run(void* engine, const spillway_transfer* transfers, uint64_t count,
                                     uint64_t block_bytes, uint64_t* failed);

/* ---- Memory ---- */

/* Takes every page of fresh memory from the system, on several threads. Contents stay. */
SPILLWAY_API void spillway_touch(void* memory, uint64_t bytes, int32_t threads);

/* ---- Checksums ---- */

/* Advances CRC-32C values over consecutive pieces of `data`: the first has first_bytes, the others piece_bytes, the last
 * what is left. crcs[i] is the value of piece i so far (0 at its start) and is replaced. */
SPILLWAY_API void spillway_crc32c(const void* data, uint64_t bytes, uint64_t first_bytes, uint64_t piece_bytes,
                                  uint32_t* crcs, int32_t threads);

/* ---- Optimizer ---- */

enum { SPILLWAY_FLOAT32 = 0, SPILLWAY_BFLOAT16 = 1, SPILLWAY_FLOAT16 = 2, SPILLWAY_8BIT = 3 };
enum { SPILLWAY_ADAMW = 0, SPILLWAY_LION = 1, SPILLWAY_SGD = 2 };

/* One optimizer step over n elements, in place; the scalars are those of the torch.optim classes, already in the
 * precision in which they apply them. Weights are float32; or bfloat16 with `low` holding what the fp32 master has below
 * them: its lower 16 bits, or 8 of them; or float16 with `low` the fp32 master itself. Moments are float32, bfloat16, or 8 bits in blocks of 64 elements
 * (update_blocks.inc has their form); narrow ones are rounded stochastically by a hash of the element's or the block's
 * number and the seed, so the same call gives the same bits. */
typedef struct {
  void* weight;
  void* low; /* NULL for float32 weights */
  void* m;
  void* v;         /* AdamW only */
  uint8_t* scales; /* 8 bits: two bytes a block, the exponents of m and v */
  const void* grad;
  uint64_t n;     /* 8 bits: whole blocks */
  uint64_t first; /* number of the first element, for the hash */
  int32_t rule;
  int32_t weight_type;
  int32_t low_bits; /* bfloat16 weights: 16 or 8 */
  int32_t moment_type;
  int32_t grad_type; /* where moments are not float32: float32, or that of the weights */
  uint32_t seed;
  float grad_scale; /* 1 leaves the gradient as it is */
  float decay;      /* AdamW, Lion: 1 - lr * weight_decay */
  float l2;         /* SGD: weight_decay, added to the gradient */
  float beta1;      /* SGD: momentum */
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float bias_correction2_sqrt;
  float eps;
  float negative_step_size; /* AdamW: -lr / bias_correction1; Lion, SGD: -lr */
} spillway_update_args;

/* 0 or -EINVAL. */
SPILLWAY_API int32_t spillway_update(const spillway_update_args* args, int32_t threads);

/* Sum of squares in double precision; the same bits whatever the number of threads. */
SPILLWAY_API double spillway_sum_squares(const void* values, int32_t type, uint64_t n, int32_t threads);
