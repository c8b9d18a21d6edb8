// Objects of which each process has one.

#pragma once

#include <unistd.h>

#include <atomic>

namespace gptpar {

// This process's T. A forked child gets one of its own: the threads of its parent's do not exist there. Never destroyed:
// T's threads sleep on, and touch nothing that the end of the process destroys.
template <class T>
T& of_this_process() {
  struct Owned {
    const pid_t process = getpid();
    T value;
  };
  static std::atomic<Owned*> current{nullptr};
  Owned* owned = current.load();
  while (!owned || owned->process != getpid()) {
    Owned* fresh = new Owned;
    if (current.compare_exchange_strong(owned, fresh)) return fresh->value;
    delete fresh;
  }
  return owned->value;
}

}  // namespace gptpar
