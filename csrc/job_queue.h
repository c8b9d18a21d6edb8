// A queue of jobs that one background thread does in order, while the caller prepares the next job.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <queue>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "thread_pool.h"

namespace gptpar {

struct Done {
  int32_t code;
  double begin, end;  // seconds of the monotonic clock
};

class JobQueue {
 public:
  using Work = std::function<int32_t()>;

  // Returns a ticket for wait(). If no thread can be started (there are too many), does the work before returning.
  int64_t submit(Work work) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t ticket = ++last_ticket_;
    if (!start()) {
      lock.unlock();
      const Done done = timed(work);
      lock.lock();
      done_.emplace(ticket, done);
      return ticket;
    }
    waiting_.emplace(ticket, std::move(work));
    arrived_.notify_one();
    return ticket;
  }

  bool is_done(int64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_.count(ticket) > 0;
  }

  // Waits for the job; returns its result and its times. A ticket can be used once.
  Done wait(int64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return done_.count(ticket) > 0; });
    const Done done = done_[ticket];
    done_.erase(ticket);
    return done;
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  static Done timed(const Work& work) {
    const double begin = now();
    const int32_t code = work();
    return {code, begin, now()};
  }

  bool start() try {
    if (!started_) {
      const NoSignals quiet;
      std::thread(&JobQueue::serve, this).detach();
      started_ = true;
    }
    return true;
  } catch (const std::system_error&) {
    return false;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      arrived_.wait(lock, [&] { return !waiting_.empty(); });
      const auto [ticket, work] = std::move(waiting_.front());
      waiting_.pop();
      lock.unlock();
      const Done done = timed(work);
      lock.lock();
      done_.emplace(ticket, done);
      finished_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable arrived_, finished_;
  std::queue<std::pair<int64_t, Work>> waiting_;
  std::unordered_map<int64_t, Done> done_;
  int64_t last_ticket_ = 0;
  bool started_ = false;
};

}  // namespace gptpar
