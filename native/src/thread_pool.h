// Runs the chunks of a loop on a fixed set of threads. The calling thread works too.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

class ThreadPool {
 public:
  // A process that was forked has one of its own.
  static ThreadPool& shared();
  ~ThreadPool();

  // Ends a pool of this process; of one that was forked, whose threads cannot be waited for, nothing is touched.
  struct Ending {
    void operator()(ThreadPool* pool) const {
      if (!pool->is_of_parent()) delete pool;
    }
  };

  // Calls body(i) for every i in [0, count) on at most `threads` threads; returns when all are done. Loops started from
  // several threads run one after another. In a process forked since the pool was made its threads are not there: the
  // calling thread does it all.
  void run(uint64_t count, int threads, const std::function<void(uint64_t)>& body);

 private:
  void work();
  void grow(int workers);
  bool is_of_parent() const { return getpid() != process_; }

  const pid_t process_ = getpid();
  std::mutex caller_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> workers_;
  const std::function<void(uint64_t)>* body_ = nullptr;
  std::atomic<uint64_t> next_{0};
  uint64_t count_ = 0;
  uint64_t loop_ = 0;
  int wanted_ = 0, busy_ = 0;
  bool ending_ = false;
};
