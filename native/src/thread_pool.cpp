#include "thread_pool.h"

#include <system_error>

// Never destroyed: its threads sleep until the process ends, whatever order the libraries are unloaded in.
ThreadPool& ThreadPool::shared() {
  static std::atomic<ThreadPool*> pool{nullptr};
  ThreadPool* found = pool;
  while (found == nullptr || found->is_of_parent()) {
    ThreadPool* const made = new ThreadPool;
    if (pool.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

// As many as there may be: where the system refuses more threads, those there are do the work.
void ThreadPool::grow(int workers) {
  try {
    while (int(workers_.size()) < workers) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
  }
}

void ThreadPool::work() {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return ending_ || (loop_ != seen && wanted_ > 0); });
    if (ending_) return;
    seen = loop_;
    --wanted_;
    ++busy_;
    lock.unlock();
    for (uint64_t i; (i = next_.fetch_add(1)) < count_;) (*body_)(i);
    lock.lock();
    if (--busy_ == 0) idle_.notify_all();
  }
}

void ThreadPool::run(uint64_t count, int threads, const std::function<void(uint64_t)>& body) {
  if (threads <= 1 || count <= 1 || is_of_parent()) {
    for (uint64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::lock_guard<std::mutex> one_loop(caller_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    grow(threads - 1);
    body_ = &body;
    count_ = count;
    next_ = 0;
    wanted_ = threads - 1;
    ++loop_;
  }
  wake_.notify_all();
  for (uint64_t i; (i = next_.fetch_add(1)) < count;) body(i);
  std::unique_lock<std::mutex> lock(mutex_);
  wanted_ = 0;  // workers that did not wake in time stay asleep
  idle_.wait(lock, [&] { return busy_ == 0; });
}
