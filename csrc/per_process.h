// Gives each process one object of a type; a forked child gets a new one.

#pragma once

#include <unistd.h>

#include <atomic>

namespace gptpar {

// This process's T. A forked child gets a new T, because the threads of its parent's T do not exist in the child.
// A T is never destroyed: its sleeping threads may outlive main(), and must find their mutexes intact.
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
