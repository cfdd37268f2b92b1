/* A small fault layer: loaded before everything else, it makes reads and writes of the store's files fail, by pread and
 * pwrite and by io_uring, whose results are changed where the kernel leaves them.
 *
 * SPILLWAY_FAULT=KIND:FIRST:COUNT, KIND one of eio, short, enospc: calls FIRST to FIRST+COUNT-1 (counted from 1, reads
 * and writes of `spillway.data` together) fail, or move half of what was asked for. KIND full: from call FIRST on nothing
 * under a directory `run` gets any more room, as if another program had filled the drive. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*move_type)(int, void*, size_t, off_t);

static long calls = 0;

static int has_in_path(int fd, const char* part) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return strstr(path, part) != NULL;
}

static int is_full(void) {
  const char* fault = getenv("SPILLWAY_FAULT");
  long first;
  return fault != NULL && sscanf(fault, "full:%ld", &first) == 1 &&
         __atomic_load_n(&calls, __ATOMIC_SEQ_CST) >= first;
}

/* What becomes of the next transfer of so many bytes: they, fewer of them, or a negative errno. */
static ssize_t verdict(ssize_t bytes) {
  const char* fault = getenv("SPILLWAY_FAULT");
  char kind[16];
  long first, count;
  if (fault == NULL || sscanf(fault, "%15[a-z]:%ld:%ld", kind, &first, &count) != 3) return bytes;
  const long call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
  if (strcmp(kind, "full") == 0 || call < first || call >= first + count) return bytes;
  if (strcmp(kind, "short") == 0) return bytes > 8192 ? bytes / 8192 * 4096 : bytes;
  return strcmp(kind, "eio") == 0 ? -EIO : -ENOSPC;
}

static ssize_t move(const char* name, int fd, void* buffer, size_t bytes, off_t offset) {
  move_type original = (move_type)dlsym(RTLD_NEXT, name);
  const ssize_t allowed = has_in_path(fd, "/spillway.data") ? verdict((ssize_t)bytes) : (ssize_t)bytes;
  if (allowed >= 0) return original(fd, buffer, (size_t)allowed, offset);
  errno = (int)-allowed;
  return -1;
}

/* io_uring: the rings of the process, with the files registered with each, and which of its requests are the store's. */
typedef struct {
  int fd, num_files, files[64];
  char *rings, *entries, ours[1 << 16];
  struct io_uring_params params;
} ring_type;

static ring_type* rings[64];

static ring_type* ring_of(int fd) {
  for (int i = 0; i < 64; ++i)
    if (rings[i] != NULL && rings[i]->fd == fd) return rings[i];
  return NULL;
}

static void note_ring(int fd, const struct io_uring_params* params) {
  ring_type* ring = ring_of(fd); /* of a number that was closed and given out again */
  for (int i = 0; ring == NULL && i < 64; ++i)
    if (rings[i] == NULL) ring = rings[i] = malloc(sizeof *ring);
  memset(ring, 0, sizeof *ring);
  ring->fd = fd;
  ring->params = *params;
  const size_t completions = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
  const int both = PROT_READ | PROT_WRITE;
  ring->rings = mmap(NULL, completions, both, MAP_SHARED, fd, IORING_OFF_SQ_RING);
  ring->entries = mmap(NULL, params->sq_entries * sizeof(struct io_uring_sqe), both, MAP_SHARED, fd, IORING_OFF_SQES);
}

static void note_requests(ring_type* ring, unsigned count) {
  const unsigned tail = *(unsigned*)(ring->rings + ring->params.sq_off.tail);
  for (unsigned at = tail - count; at != tail; ++at) {
    const struct io_uring_sqe* entry = (struct io_uring_sqe*)ring->entries + at % ring->params.sq_entries;
    const int fd = entry->flags & IOSQE_FIXED_FILE ? ring->files[entry->fd] : entry->fd;
    ring->ours[entry->user_data % sizeof ring->ours] = (char)has_in_path(fd, "/spillway.data");
  }
}

/* Of those that the process has not seen. */
static void change_results(ring_type* ring, unsigned* at) {
  const unsigned tail = __atomic_load_n((unsigned*)(ring->rings + ring->params.cq_off.tail), __ATOMIC_ACQUIRE);
  for (; *at != tail; ++*at) {
    struct io_uring_cqe* found =
        (struct io_uring_cqe*)(ring->rings + ring->params.cq_off.cqes) + *at % ring->params.cq_entries;
    if (found->res > 0 && ring->ours[found->user_data % sizeof ring->ours]) found->res = (int)verdict(found->res);
  }
}

long syscall(long number, ...) {
  static long (*original)(long, ...) = NULL;
  if (original == NULL) original = dlsym(RTLD_NEXT, "syscall");
  long a[6];
  va_list more;
  va_start(more, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(more, long);
  va_end(more);
  ring_type* ring = number == __NR_io_uring_enter || number == __NR_io_uring_register ? ring_of((int)a[0]) : NULL;
  unsigned seen = 0;
  if (ring != NULL && number == __NR_io_uring_enter) {
    note_requests(ring, (unsigned)a[1]);
    seen = *(unsigned*)(ring->rings + ring->params.cq_off.head);
  }
  const long result = original(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  const int error = errno;
  if (number == __NR_io_uring_setup && result >= 0) note_ring((int)result, (struct io_uring_params*)a[1]);
  if (ring != NULL && number == __NR_io_uring_register && a[1] == IORING_REGISTER_FILES && result >= 0)
    memcpy(ring->files, (int*)a[2], (size_t)a[3] * sizeof(int));
  if (ring != NULL && number == __NR_io_uring_enter) change_results(ring, &seen);
  errno = error;
  return result;
}

ssize_t pread(int fd, void* buffer, size_t bytes, off_t offset) { return move("pread", fd, buffer, bytes, offset); }
ssize_t pread64(int fd, void* buffer, size_t bytes, off_t offset) { return move("pread64", fd, buffer, bytes, offset); }
ssize_t pwrite(int fd, const void* buffer, size_t bytes, off_t offset) {
  return move("pwrite", fd, (void*)buffer, bytes, offset);
}
ssize_t pwrite64(int fd, const void* buffer, size_t bytes, off_t offset) {
  return move("pwrite64", fd, (void*)buffer, bytes, offset);
}

ssize_t write(int fd, const void* buffer, size_t bytes) {
  ssize_t (*original)(int, const void*, size_t) = dlsym(RTLD_NEXT, "write");
  struct stat found;
  if (is_full() && has_in_path(fd, "/run/") && fstat(fd, &found) == 0 && S_ISREG(found.st_mode)) {
    const off_t from = fcntl(fd, F_GETFL) & O_APPEND ? found.st_size : lseek(fd, 0, SEEK_CUR);
    if (from + (off_t)bytes > found.st_size) {
      errno = ENOSPC;
      return -1;
    }
  }
  return original(fd, buffer, bytes);
}

static int open_as(const char* name, const char* path, int flags, mode_t mode) {
  int (*original)(const char*, int, ...) = dlsym(RTLD_NEXT, name);
  if (is_full() && flags & O_CREAT && strstr(path, "/run/") != NULL && access(path, F_OK) != 0) {
    errno = ENOSPC;
    return -1;
  }
  return original(path, flags, mode);
}

#define OPEN(name)                                       \
  int name(const char* path, int flags, ...) {           \
    va_list more;                                        \
    va_start(more, flags);                               \
    const mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; \
    va_end(more);                                        \
    return open_as(#name, path, flags, mode);            \
  }

OPEN(open)
OPEN(open64)
