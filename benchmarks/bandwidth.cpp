// What memory allows a CPU optimizer step: the streams, blocks, threads and stores of csrc/cpu_adam.cpp without its
// square root and divisions. Plain C ABI, loaded with ctypes.

#include <cstdint>

#include "../csrc/blocks.h"
#include "../csrc/cpu_adam_scalar.h"
#include "../csrc/thread_pool.h"

#if defined(__x86_64__)
#include "../csrc/cpu_adam_x86.h"
#endif

namespace gptpar {

struct Arrays {
  const float* in[3];
  float* out[3];
  const Bfloat* grad;
  Bfloat* low;
};

#define GPTPAR_PASS(name, V, target)                                                   \
  target void name(const Arrays& a, int64_t first, int64_t last) {                     \
    const bool stream = a.in[0] != a.out[0];                                           \
    for (int64_t i = first; i + kRun <= last; i += kRun) {                             \
      const int64_t ahead = i + kAhead;                                                \
      prefetch(a.in[0] + ahead, a.in[1] + ahead, a.in[2] + ahead, a.grad + ahead);     \
      V::Floats fresh[kRun / V::width];                                                \
      for (int j = 0, at = 0; at < kRun; ++j, at += V::width) {                        \
        const auto g = V::load(a.grad + i + at);                                       \
        fresh[j] = V::add(V::load(a.in[0] + i + at), g);                               \
        V::store(a.out[1] + i + at, V::add(V::load(a.in[1] + i + at), g), stream);     \
        V::store(a.out[2] + i + at, V::add(V::load(a.in[2] + i + at), g), stream);     \
        V::store(a.out[0] + i + at, fresh[j], stream);                                 \
      }                                                                                \
      for (int j = 0, at = 0; at < kRun; ++j, at += V::width)                          \
        V::store(a.low + i + at, fresh[j], true);                                      \
    }                                                                                  \
  }

GPTPAR_PASS(scalar_pass, Scalar, )
#if defined(__x86_64__)
GPTPAR_PASS(avx2_pass, Avx2, GPTPAR_AVX2)
GPTPAR_PASS(avx512_pass, Avx512, GPTPAR_AVX512)
#endif

}  // namespace gptpar

extern "C" {

// arrays: addresses of p, m, v, their outputs, bf16 gradients and bf16 parameters, each at the start of a cache line.
// isa: the index of cpu_adam_isa's name: 0 scalar, 1 AVX2, 2 AVX-512, which the processor must have.
void bandwidth_pass(void* const* arrays, int64_t n, int32_t threads, int32_t isa) {
  gptpar::Arrays a;
  for (int k = 0; k < 3; ++k) {
    a.in[k] = static_cast<const float*>(arrays[k]);
    a.out[k] = static_cast<float*>(arrays[3 + k]);
  }
  a.grad = static_cast<const gptpar::Bfloat*>(arrays[6]);
  a.low = static_cast<gptpar::Bfloat*>(arrays[7]);
  auto pass = gptpar::scalar_pass;
#if defined(__x86_64__)
  if (isa == 1) pass = gptpar::avx2_pass;
  if (isa == 2) pass = gptpar::avx512_pass;
#endif
  const GptparGroupRange whole{0, n, 0};
  const gptpar::Blocks blocks(&whole, 1, threads);
  gptpar::of_this_process<gptpar::ThreadPool>().run(blocks.count(), threads, [&](int64_t block) {
    pass(a, blocks.begin(block)->start, blocks.begin(block)->stop);
  });
}

}  // extern "C"
