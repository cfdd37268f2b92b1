/* A small fault layer: loaded before everything else, it makes pread and pwrite of the store's files fail.
 *
 * SPILLWAY_FAULT=KIND:FIRST:COUNT, KIND one of eio, short, enospc: calls FIRST to FIRST+COUNT-1 (counted from 1, reads
 * and writes of `spillway.data` together) fail, or move half of what was asked for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*move_type)(int, void*, size_t, off_t);

static long calls = 0;

static int is_store(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return strstr(path, "/spillway.data") != NULL;
}

static ssize_t move(const char* name, int fd, void* buffer, size_t bytes, off_t offset) {
  move_type original = (move_type)dlsym(RTLD_NEXT, name);
  const char* fault = getenv("SPILLWAY_FAULT");
  char kind[16];
  long first, count;
  if (fault != NULL && sscanf(fault, "%15[a-z]:%ld:%ld", kind, &first, &count) == 3 && is_store(fd)) {
    const long call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (call >= first && call < first + count) {
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
