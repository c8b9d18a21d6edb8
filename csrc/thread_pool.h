// A pool of threads that take blocks of work from a shared counter; an idle thread looks for work, then sleeps.
//
// Why not OpenMP: torch brings its own OpenMP runtime, and a second one in the process can clash with it. A team of
// OpenMP threads belongs to the thread that opens the parallel region, so the training loop and the updating thread
// would each keep a full team. After a fork the teams' threads are gone, and the next region may hang. And environment
// variables set how long idle threads look for work before they sleep: for the whole process, torch's threads included.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "ieee_mode.h"
#include "per_process.h"

namespace gptpar {

constexpr int kLooks = 5000;  // how often a thread looks for work before it sleeps: about 0.2 ms

// While it exists, new threads start with all signals blocked: signals are for the program's own threads.
class NoSignals {
  sigset_t before_;

 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
};

class ThreadPool {
 public:
  // Calls work(block) once for every block in [0, num_blocks), on up to `threads` threads including the caller's.
  // Calls from several threads run one after the other.
  template <class Work>
  void run(int64_t num_blocks, int threads, const Work& work) {
    const int helpers = static_cast<int>(std::min<int64_t>(threads, num_blocks)) - 1;
    Job job{[](const void* body, int64_t block) { (*static_cast<const Work*>(body))(block); }, &work, num_blocks};
    if (helpers <= 0) return job.drain();
    std::lock_guard<std::mutex> one_call(calls_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      job_ = &job;
      wanted_ = busy_ = std::min(helpers, size_);
      ++round_;
    }
    start_.notify_all();
    job.drain();
    look_for([&] { return busy_ == 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return busy_ == 0; });
  }

  // Wakes sleeping threads, which then look for work for a moment. Does not wait until they are awake: in a virtual
  // machine that took up to 1.5 ms, and a call can begin with the threads that are awake.
  void rouse() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++roused_;
    }
    start_.notify_all();
  }

 private:
  struct Job {
    void (*call)(const void*, int64_t);
    const void* body;
    int64_t num_blocks;
    std::atomic<int64_t> next{0};

    Job(void (*call_)(const void*, int64_t), const void* body_, int64_t count)
        : call(call_), body(body_), num_blocks(count) {}

    void drain() {
      const IeeeMode mode;  // a thread inherits its mode from whichever thread started it
      for (int64_t block; (block = next.fetch_add(1)) < num_blocks;) call(body, block);
    }
  };

  // Looks for a condition in a busy loop before sleeping: calls follow each other closely, and waking up costs more.
  template <class Condition>
  static void look_for(const Condition& condition) {
    for (int i = 0; i < kLooks && !condition(); ++i) {
#if defined(__x86_64__)
      _mm_pause();
#else
      std::this_thread::yield();
#endif
    }
  }

  void grow(int helpers) {
    const NoSignals quiet;
    try {
      for (; size_ < helpers; ++size_) std::thread(&ThreadPool::serve, this, size_, round_.load()).detach();
    } catch (const std::system_error&) {  // the process has too many threads: the existing ones do the work
    }
  }

  void serve(int index, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    for (;;) {
      look_for([&] { return round_ != seen; });
      lock.lock();
      const uint64_t roused = roused_;
      start_.wait(lock, [&] { return round_ != seen || roused_ != roused; });
      if (round_ == seen) {
        lock.unlock();
        continue;
      }
      seen = round_;
      const bool takes_part = index < wanted_;
      Job* job = job_;
      lock.unlock();
      if (!takes_part) continue;
      job->drain();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
      lock.unlock();
    }
  }

  std::mutex calls_, mutex_;
  std::condition_variable start_, done_;
  Job* job_ = nullptr;
  std::atomic<uint64_t> round_{0};
  uint64_t roused_ = 0;
  int size_ = 0, wanted_ = 0;
  std::atomic<int> busy_{0};
};

}  // namespace gptpar
