/* A small fault layer: loaded before everything else, it makes pread and pwrite of the store's files fail.
 *
 * SPILLWAY_FAULT=KIND:FIRST:COUNT, KIND one of eio, short, enospc: calls FIRST to FIRST+COUNT-1 (counted from 1, reads
 * and writes of `spillway.data` together) fail, or move half of what was asked for. KIND full: from call FIRST on nothing
 * under a directory `run` gets any more room, as if another program had filled the drive. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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

static ssize_t move(const char* name, int fd, void* buffer, size_t bytes, off_t offset) {
  move_type original = (move_type)dlsym(RTLD_NEXT, name);
  const char* fault = getenv("SPILLWAY_FAULT");
  char kind[16];
  long first, count;
  if (fault != NULL && sscanf(fault, "%15[a-z]:%ld:%ld", kind, &first, &count) == 3 &&
      has_in_path(fd, "/spillway.data")) {
    const long call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (strcmp(kind, "full") != 0 && call >= first && call < first + count) {
      if (strcmp(kind, "short") == 0) return original(fd, buffer, bytes > 8192 ? bytes / 8192 * 4096 : bytes, offset);
      errno = strcmp(kind, "eio") == 0 ? EIO : ENOSPC;
      return -1;
    }
  }
  return original(fd, buffer, bytes, offset);
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
