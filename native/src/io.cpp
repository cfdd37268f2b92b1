// Disk transfers: io_uring by raw system calls where the kernel allows it, otherwise a pool of threads.
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

#include "spillway.h"
#include "thread_pool.h"

namespace {

// A piece of a transfer small enough to be one request; `done` grows on short reads and writes.
struct Block {
  int fd;
  bool is_write;
  char* buffer;
  uint64_t offset, bytes, done, transfer;
  int tries, waits;
};

// A drive may fail a request once and serve it the next time; one that fails as often as this is broken.
constexpr int kTries = 4;
// A kernel short of memory asks to be asked again: every millisecond, for some seconds.
constexpr int kWaits = 10'000;

// Batches of reads under way in the process. The next operations wait for what they bring, and nothing for a write until
// its memory is wanted again: so long as there are any, a batch of writes has no more than this many requests in flight,
// for a drive (and what is before it) serves requests about as they come.
std::atomic<int> num_reading{0};
constexpr unsigned kWritesBesideReads = 4;

struct Reading {
  explicit Reading(bool is_reading) : count(is_reading ? 1 : 0) { num_reading += count; }
  ~Reading() { num_reading -= count; }
  const int count;
};

std::vector<Block> cut(const spillway_transfer* transfers, uint64_t count, uint64_t block_bytes) {
  std::vector<Block> blocks;
  for (uint64_t t = 0; t < count; ++t) {
    const spillway_transfer& whole = transfers[t];
    for (uint64_t at = 0; at < whole.bytes; at += block_bytes) {
      const uint64_t bytes = whole.bytes - at < block_bytes ? whole.bytes - at : block_bytes;
      blocks.push_back({whole.fd, whole.is_write != 0, static_cast<char*>(whole.buffer) + at, whole.offset + at, bytes,
                        0, t, 0, 0});
    }
  }
  return blocks;
}

// What a finished request means for its block: 0 goes on (done or to be resubmitted), else -errno.
int account(Block& block, int64_t result) {
  if (result == -EINTR) return 0;
  if (result == -EAGAIN && ++block.waits < kWaits) {
    usleep(1000);
    return 0;
  }
  if (result == -EIO && ++block.tries < kTries) return 0;
  if (result < 0) return int(result);
  if (result == 0) return block.is_write ? -ENOSPC : -ENODATA;
  block.done += uint64_t(result);
  return 0;
}

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* name() const = 0;
  // 0, or -errno: what could not be registered is passed anew with every request.
  virtual int register_all(const int32_t*, uint32_t, void*, uint64_t) { return -ENOTSUP; }
  // 0, or -errno with *failed the transfer that failed.
  virtual int run(std::vector<Block>& blocks, uint64_t* failed) = 0;
};

class ThreadEngine final : public Engine {
 public:
  explicit ThreadEngine(unsigned depth) : threads_(int(depth < 8 ? depth : 8)) {}
  const char* name() const override { return "threads"; }

  int run(std::vector<Block>& blocks, uint64_t* failed) override {
    std::atomic<int> error{0};
    pool_->run(blocks.size(), threads_, [&](uint64_t i) {
      Block& block = blocks[i];
      while (error == 0 && block.done < block.bytes) {
        char* at = block.buffer + block.done;
        const uint64_t left = block.bytes - block.done;
        const off_t offset = off_t(block.offset + block.done);
        const ssize_t n = block.is_write ? pwrite(block.fd, at, left, offset) : pread(block.fd, at, left, offset);
        const int wrong = account(block, n < 0 ? -errno : n);
        int none = 0;
        if (wrong != 0 && error.compare_exchange_strong(none, wrong)) *failed = block.transfer;
      }
    });
    return error;
  }

 private:
  int threads_;
  std::unique_ptr<ThreadPool, ThreadPool::Ending> pool_{new ThreadPool};  // its own: the shared serves the optimizer
};

class RingEngine final : public Engine {
 public:
  // nullptr where io_uring is missing or forbidden (old kernels, seccomp in containers, sysctl).
  static std::unique_ptr<Engine> open(unsigned depth) {
    std::unique_ptr<RingEngine> ring(new RingEngine);
    return ring->set_up(depth) ? std::move(ring) : nullptr;
  }

  ~RingEngine() override {
    if (entries_ != MAP_FAILED) munmap(entries_, entries_bytes_);
    if (rings_ != MAP_FAILED) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  const char* name() const override { return "io_uring"; }

  int register_all(const int32_t* fds, uint32_t num_fds, void* memory, uint64_t bytes) override {
    if (!files_.empty()) call_register(IORING_UNREGISTER_FILES, nullptr, 0);
    if (memory_bytes_ != 0) call_register(IORING_UNREGISTER_BUFFERS, nullptr, 0);
    files_.clear();
    memory_bytes_ = 0;
    int refused = 0;
    if (num_fds != 0) {
      refused = call_register(IORING_REGISTER_FILES, fds, num_fds);
      if (refused == 0) files_.assign(fds, fds + num_fds);
    }
    if (memory == nullptr || bytes == 0) return refused;
    std::vector<iovec> parts;
    for (uint64_t at = 0; at < bytes; at += kPart)
      parts.push_back({static_cast<char*>(memory) + at, bytes - at < kPart ? bytes - at : kPart});
    refused = call_register(IORING_REGISTER_BUFFERS, parts.data(), unsigned(parts.size()));
    if (refused != 0) return refused;
    memory_ = static_cast<char*>(memory);
    memory_bytes_ = bytes;
    return 0;
  }

  int run(std::vector<Block>& blocks, uint64_t* failed) override {
    if (is_broken_) return -EIO;
    int error = 0;
    uint64_t next = 0, in_flight = 0;
    std::vector<uint64_t> again;
    while (in_flight > 0 || (error == 0 && (next < blocks.size() || !again.empty()))) {
      unsigned queued = 0;
      const unsigned most = blocks[0].is_write && num_reading > 0 ? kWritesBesideReads : depth_;
      while (error == 0 && in_flight + queued < most && (next < blocks.size() || !again.empty())) {
        uint64_t i;
        if (again.empty()) {
          i = next++;
        } else {
          i = again.back();
          again.pop_back();
        }
        push(blocks[i], i);
        ++queued;
      }
      in_flight += queued;
      if (!enter(queued)) {
        // The ring itself failed, and what completes later would be taken for blocks of another run. So there is none.
        error = -errno;
        is_broken_ = true;
        *failed = 0;
        settle(blocks, in_flight);
        return error;
      }
      in_flight -= reap(blocks, again, &error, failed);
    }
    return error;
  }

 private:
  static constexpr uint64_t kPart = uint64_t(1) << 30;  // the most that the kernel takes as one buffer

  int call_register(unsigned what, const void* argument, unsigned count) {
    return syscall(__NR_io_uring_register, fd_, what, argument, count) < 0 ? -errno : 0;
  }

  bool set_up(unsigned depth) {
    io_uring_params params;
    std::memset(&params, 0, sizeof params);
    fd_ = int(syscall(__NR_io_uring_setup, depth, &params));
    if (fd_ < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP) ||
        !(params.features & IORING_FEAT_RW_CUR_POS))  // Linux 5.6: the first with plain reads and writes
      return false;
    depth_ = params.sq_entries;
    const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    rings_ = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQ_RING);
    entries_ = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQES);
    if (rings_ == MAP_FAILED || entries_ == MAP_FAILED) return false;
    char* base = static_cast<char*>(rings_);
    sq_head_ = reinterpret_cast<unsigned*>(base + params.sq_off.head);
    sq_tail_ = reinterpret_cast<unsigned*>(base + params.sq_off.tail);
    sq_mask_ = *reinterpret_cast<unsigned*>(base + params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<unsigned*>(base + params.sq_off.array);
    cq_head_ = reinterpret_cast<unsigned*>(base + params.cq_off.head);
    cq_tail_ = reinterpret_cast<unsigned*>(base + params.cq_off.tail);
    cq_mask_ = *reinterpret_cast<unsigned*>(base + params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
    return syscall(__NR_io_uring_enter, fd_, 0, 0, 0, nullptr, 0) == 0;  // it may be forbidden alone
  }

  void push(const Block& block, uint64_t index) {
    const unsigned tail = *sq_tail_;  // only this thread writes it
    const unsigned slot = tail & sq_mask_;
    io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[slot];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = block.is_write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = block.fd;
    for (size_t index = 0; index < files_.size(); ++index) {
      if (files_[index] == block.fd) {
        entry.fd = int(index);
        entry.flags |= IOSQE_FIXED_FILE;
        break;
      }
    }
    char* const from = block.buffer + block.done;
    entry.addr = reinterpret_cast<uint64_t>(from);
    entry.len = unsigned(block.bytes - block.done);
    const uint64_t begin = uint64_t(from - memory_), last = begin + entry.len - 1;
    if (memory_bytes_ != 0 && from >= memory_ && last < memory_bytes_ && begin / kPart == last / kPart) {
      entry.opcode = block.is_write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
      entry.buf_index = uint16_t(begin / kPart);
    }
    // Where the drive's scheduler knows priorities, what someone waits for goes before write-back.
    entry.ioprio = block.is_write ? kLowPriority : kHighPriority;
    entry.off = block.offset + block.done;
    entry.user_data = index;
    sq_array_[slot] = slot;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  }

  // Submits `queued` entries and waits for at least one completion.
  bool enter(unsigned queued) {
    for (int waits = 0;;) {
      const long sent = syscall(__NR_io_uring_enter, fd_, queued, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (sent >= 0 && unsigned(sent) == queued) return true;
      if (sent >= 0) {
        queued -= unsigned(sent);
      } else if ((errno == EAGAIN || errno == EBUSY) && ++waits < kWaits) {
        usleep(1000);
      } else if (errno != EINTR) {
        return false;
      }
    }
  }

  // Returns when the kernel no longer uses the buffers of what it took, or does not say so for long.
  void settle(std::vector<Block>& blocks, uint64_t in_flight) {
    std::vector<uint64_t> again;
    int error = 0;
    uint64_t failed = 0;
    for (int waits = 0; waits < 10'000; ++waits) {
      in_flight -= reap(blocks, again, &error, &failed);
      const unsigned not_taken = *sq_tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
      if (in_flight <= not_taken) return;
      usleep(1000);
    }
  }

  uint64_t reap(std::vector<Block>& blocks, std::vector<uint64_t>& again, int* error, uint64_t* failed) {
    unsigned head = *cq_head_;  // only this thread writes it
    const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    uint64_t reaped = 0;
    for (; head != tail; ++head, ++reaped) {
      const io_uring_cqe& completion = completions_[head & cq_mask_];
      Block& block = blocks[completion.user_data];
      const int wrong = account(block, completion.res);
      if (wrong != 0 && *error == 0) {
        *error = wrong;
        *failed = block.transfer;
      }
      if (wrong == 0 && block.done < block.bytes) again.push_back(completion.user_data);
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    return reaped;
  }

  // Best effort class, level 0 and 7 (linux/ioprio.h).
  static constexpr uint16_t kHighPriority = 2 << 13 | 0, kLowPriority = 2 << 13 | 7;

  int fd_ = -1;
  bool is_broken_ = false;
  std::vector<int32_t> files_;
  char* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  unsigned depth_ = 0, sq_mask_ = 0, cq_mask_ = 0;
  void* rings_ = MAP_FAILED;
  void* entries_ = MAP_FAILED;
  size_t rings_bytes_ = 0, entries_bytes_ = 0;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
};

}  // namespace

void* spillway_io_open(uint32_t depth, int32_t use_uring) {
  std::unique_ptr<Engine> engine;
  if (use_uring != 0) engine = RingEngine::open(depth);
  if (!engine) engine.reset(new ThreadEngine(depth));
  return engine.release();
}

void spillway_io_close(void* engine) { delete static_cast<Engine*>(engine); }

const char* spillway_io_backend(void* engine) { return static_cast<Engine*>(engine)->name(); }

int32_t spillway_io_register(void* engine, const int32_t* fds, uint32_t num_fds, void* memory, uint64_t bytes) {
  return static_cast<Engine*>(engine)->register_all(fds, num_fds, memory, bytes);
}

void spillway_touch(void* memory, uint64_t bytes, int32_t threads) {
  constexpr uint64_t kPage = 4096, kChunk = uint64_t(2) << 20;
  char* const begin = static_cast<char*>(memory);
  ThreadPool::shared().run((bytes + kChunk - 1) / kChunk, threads, [&](uint64_t chunk) {
    const uint64_t stop = (chunk + 1) * kChunk < bytes ? (chunk + 1) * kChunk : bytes;
    for (uint64_t at = chunk * kChunk; at < stop; at += kPage) {
      volatile char* const byte = begin + at;
      *byte = *byte;
    }
  });
}

int32_t spillway_io_run(void* engine, const spillway_transfer* transfers, uint64_t count, uint64_t block_bytes,
                        uint64_t* failed) {
  *failed = 0;
  if (block_bytes == 0) return -EINVAL;
  std::vector<Block> blocks = cut(transfers, count, block_bytes);
  const Reading reading(!blocks.empty() && !blocks[0].is_write);
  return static_cast<Engine*>(engine)->run(blocks, failed);
}
