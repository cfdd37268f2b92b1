// Runs the chunks of a loop on a fixed set of threads. The calling thread works too.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

class ThreadPool {
 public:
  static ThreadPool& shared();
  ~ThreadPool();

  // Calls body(i) for every i in [0, count) on at most `threads` threads; returns when all are done. Loops started from
  // several threads run one after another.
  void run(uint64_t count, int threads, const std::function<void(uint64_t)>& body);

 private:
  void work();
  void grow(int workers);

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
