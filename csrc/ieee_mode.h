// IEEE 754 arithmetic while an object exists: rounding to nearest even, denormals kept.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gptpar {

// Sets the calling thread's mode, and restores the previous mode. Some libraries make their process flush denormals to
// zero, for instance those built with -ffast-math.
class IeeeMode {
 public:
#if defined(__x86_64__)
  IeeeMode() : found_(_mm_getcsr()) { set(kMaskedExceptions); }
  ~IeeeMode() { set(found_); }

 private:
  static constexpr uint32_t kMaskedExceptions = 0x1f80;  // all else 0: nearest even, neither FTZ nor DAZ
  void set(uint32_t mode) {
    if (mode != _mm_getcsr()) _mm_setcsr(mode);
  }
  const uint32_t found_;
#elif defined(__aarch64__)
  IeeeMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(found_));
    __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~IeeeMode() { __asm__ volatile("msr fpcr, %0" ::"r"(found_)); }

 private:
  uint64_t found_ = 0;
#else
  IeeeMode() {}
  ~IeeeMode() {}
#endif

 public:
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;
};

}  // namespace gptpar
