// AdamW (Loshchilov and Hutter 2019) and the elementwise parts of Muon in one pass over memory, with the best instruction set of the processor.
// Plain C ABI, loaded with ctypes.
//
// All instruction sets give the same bits, for any number of threads and any division of a vector into calls: the
// operations are those of gptpar.optim.adam_update in the same order, each rounded once to nearest, denormals included;
// moments kept in 16 or 8 bits are then rounded as gptpar.optim.rounded_states says.
// The compiler may not fuse a product with a sum (-ffp-contract=off). Only the payload of a NaN is not defined.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <numeric>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "cpu_adam_scalar.h"
#include "job_queue.h"
#include "thread_pool.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include "cpu_adam_x86.h"
#endif

extern "C" {

// The vectors and numbers of a step. Without m, the step is one of `blend`. The outputs of p, m and v are the inputs themselves (in place) or do not overlap
// them. grad has type grad_type; low gets the parameters in type low_type, unless that is kNone. m_type and v_type are
// kFloat, kBfloat or kEight.
// gptpar.optim.cpu_adam packs the same struct.
struct GptparAdamStep {
  const float* p;
  const void *m, *v;
  float* p_out;
  void *m_out, *v_out;
  const void* grad;
  void* low;
  int32_t grad_type, low_type, m_type, v_type;
  float scale;                // of the gradients
  float rest1, beta2, rest2;  // 1 - beta1, beta2, 1 - beta2
  float floor, size;          // epsilon and learning rate, corrected for the moments' bias
  float decay;                // 1 - lr * weight_decay
  int32_t ahead;              // without m and v: see blend in cpu_adam_loop.h
  uint32_t key;               // of the draws that round moments
};

static_assert(sizeof(GptparAdamStep) == 120 && sizeof(GptparGroupRange) == 24, "gptpar.optim.cpu_adam packs these");

// Elements [start, stop), in the order of a [number, 2] array.
struct GptparRange {
  int64_t start, stop;
};

}  // extern "C"

namespace gptpar {

using Step = GptparAdamStep;
using Range = GptparRange;

// Which outputs bypass the caches. That is faster only for whole lines that are not read.
struct Streams {
  bool state = false, low = false;
};

template <class T>
constexpr bool kIsRounded = !std::is_same_v<T, float>;
template <class T>
constexpr bool kIsEight = std::is_same_v<T, Eight>;

// Returns the number of elements from `first` on until all outputs that bypass the caches start a cache line together,
// and sets `streams` to these outputs. If they never do, it tries without the low outputs, then without any.
inline int64_t elements_to_alignment(const Step& s, int64_t first, Streams* streams) {
  const bool apart = s.p_out != s.p;
  const auto size_of = [](int32_t type) { return type == kFloat ? 4 : 2; };
  auto starts_line = [&](const void* base, int64_t i, int64_t size) {
    return (reinterpret_cast<uintptr_t>(base) + i * size) % kLine == 0;
  };
  const auto fits = [&](const void* base, int64_t i, int32_t type) {  // 8 bits never bypass the caches
    return type == kEight || starts_line(base, i, size_of(type));
  };
  for (const bool with_low : {true, false}) {
    if (with_low ? s.low_type == kNone : !apart) continue;
    for (int64_t i = first; i < first + kLine / 2; ++i) {
      const bool state_fits =
          !apart || (starts_line(s.p_out, i, 4) && fits(s.m_out, i, s.m_type) && fits(s.v_out, i, s.v_type));
      if (!state_fits || (with_low && !starts_line(s.low, i, size_of(s.low_type)))) continue;
      *streams = {apart, with_low};
      return i - first;
    }
  }
  return 0;
}

// Orders non-temporal stores before all later stores; nothing else does.
inline void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace gptpar

#define VARIANT scalar
#define VECTOR Scalar
#define TARGET
#include "cpu_adam_loop.h"

#if defined(__x86_64__)
#define VARIANT avx2
#define VECTOR Avx2
#define TARGET GPTPAR_AVX2
#include "cpu_adam_loop.h"

#define VARIANT avx512
#define VECTOR Avx512
#define TARGET GPTPAR_AVX512
#include "cpu_adam_loop.h"
#endif

namespace gptpar {

enum Error : int32_t { kNoSuchSet = -1, kNoSuchType = -2, kNoMemory = -3, kNotAscending = -4, kNotYet = -5 };

// The loops of one instruction set, by type of gradient (minus 1), and adam's by the types of m and v (`moment`).
struct Loops {
  const char* name;
  bool (*adam[3][3][3])(const Step&, int64_t, int64_t, int64_t);
  bool (*blend[3])(const Step&, int64_t, int64_t, int64_t);
  double (*square[3])(const void*, int64_t, int64_t);
};

#define GPTPAR_FIRST(set, grad, first) \
  { set::adam<grad, first, float>, set::adam<grad, first, Bfloat>, set::adam<grad, first, Eight> }
#define GPTPAR_ADAM(set, grad) \
  { GPTPAR_FIRST(set, grad, float), GPTPAR_FIRST(set, grad, Bfloat), GPTPAR_FIRST(set, grad, Eight) }
#define GPTPAR_LOOPS(set)                                                             \
  {                                                                                   \
    #set, {GPTPAR_ADAM(set, float), GPTPAR_ADAM(set, Bfloat), GPTPAR_ADAM(set, Half)},\
        {set::blend<float>, set::blend<Bfloat>, set::blend<Half>},                    \
        {set::square<float>, set::square<Bfloat>, set::square<Half>}                  \
  }

#if defined(__x86_64__)
const Loops kLoops[] = {GPTPAR_LOOPS(scalar), GPTPAR_LOOPS(avx2), GPTPAR_LOOPS(avx512)};

int ask_processor() {
  unsigned a, b, c = 0, d;
  const bool half = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
  if (!half || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return wide ? 2 : 1;
}
#else
const Loops kLoops[] = {GPTPAR_LOOPS(scalar)};

int ask_processor() { return 0; }
#endif

// Asked once: in a virtual machine cpuid traps to the hypervisor, which takes longer than the preparation of a step.
int best_set() {
  static const int best = ask_processor();
  return best;
}

// isa: -1 the best available, 0 scalar, 1 AVX2, 2 AVX-512. Null if the processor lacks it.
const Loops* loops_of(int32_t isa) {
  const int best = best_set();
  if (isa < -1 || isa > best) return nullptr;
  return &kLoops[isa == -1 ? best : isa];
}

int moment(int32_t type) { return type == kEight ? 2 : type - kFloat; }

bool known(int32_t type) { return type >= kFloat && type <= kHalf; }

// The intersection of the group ranges with the ranges; all group ranges if `ranges` is null.
std::vector<GroupRange> within(const GroupRange* group_ranges, int64_t count, const Range* ranges, int64_t num_ranges) {
  if (!ranges) return {group_ranges, group_ranges + count};
  std::vector<GroupRange> parts;
  parts.reserve(count + num_ranges);
  const Range* range = ranges;
  const Range* const end = ranges + num_ranges;
  for (const GroupRange* s = group_ranges; s < group_ranges + count; ++s) {
    while (range < end && range->stop <= s->start) ++range;
    for (const Range* r = range; r < end && r->start < s->stop; ++r)
      parts.push_back({std::max(s->start, r->start), std::min(s->stop, r->stop), s->of});
  }
  return parts;
}

bool ascending(const Range* ranges, int64_t count) {
  int64_t end = 0;
  for (const Range* r = ranges; r < ranges + count; ++r) {
    if (r->start < end || r->stop < r->start) return false;
    end = r->stop;
  }
  return true;
}

// A negative Error if the arguments are not valid, else 0.
int32_t error_in(const Step* steps, int32_t num_steps, const Range* ranges, int64_t num_ranges, int32_t isa) {
  if (!loops_of(isa)) return kNoSuchSet;
  for (const Step* s = steps; s < steps + num_steps; ++s) {
    if (!known(s->grad_type) || !(s->low_type == kNone || known(s->low_type))) return kNoSuchType;
  }
  return ranges && !ascending(ranges, num_ranges) ? kNotAscending : 0;
}

// See cpu_adam_step. One call of the pool processes all blocks: threads do not wait for each other between group ranges.
int32_t take(const Step* steps, const std::vector<GroupRange>& group_ranges, int threads, int32_t isa) try {
  const Loops* loops = loops_of(isa);
  std::atomic<bool> finite{true};
  const Blocks blocks(group_ranges.data(), group_ranges.size(), threads);
  of_this_process<ThreadPool>().run(blocks.count(), threads, [&](int64_t block) {
    const GroupRange* const end = blocks.end(block);
    for (const GroupRange* piece = blocks.begin(block); piece < end; ++piece) {
      const Step& s = steps[piece->of];
      const auto loop = s.m ? loops->adam[s.grad_type - 1][moment(s.m_type)][moment(s.v_type)]
                            : loops->blend[s.grad_type - 1];
      const int64_t next = piece + 1 < end ? piece[1].start : piece->stop;  // where this thread reads afterwards
      if (!loop(s, piece->start, piece->stop, next)) finite = false;
    }
    fence();
  });
  return finite.load();
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

}  // namespace gptpar

extern "C" {

// Name of the instruction set that `isa` stands for, or null if the processor lacks it.
const char* cpu_adam_isa(int32_t isa) {
  const gptpar::Loops* loops = gptpar::loops_of(isa);
  return loops ? loops->name : nullptr;
}

// Takes one step over `count` group ranges, each with the numbers of one of `num_steps` steps. ranges: null, or
// ascending ranges that limit the update to their elements. Returns 1 if every gradient was finite, 0 if not (all
// elements are updated all the same), or a negative Error.
int32_t cpu_adam_step(const GptparAdamStep* steps, int32_t num_steps, const GptparGroupRange* group_ranges,
                      int64_t count, const GptparRange* ranges, int64_t num_ranges, int32_t threads, int32_t isa) try {
  if (const int32_t error = gptpar::error_in(steps, num_steps, ranges, num_ranges, isa)) return error;
  return gptpar::take(steps, gptpar::within(group_ranges, count, ranges, num_ranges), threads, isa);
} catch (const std::bad_alloc&) {
  return gptpar::kNoMemory;
}

// Like cpu_adam_step, in the background: orders run one after the other. Returns a ticket, or a negative Error.
int64_t cpu_adam_order(const GptparAdamStep* steps, int32_t num_steps, const GptparGroupRange* group_ranges,
                       int64_t count, const GptparRange* ranges, int64_t num_ranges, int32_t threads, int32_t isa) try {
  if (const int32_t error = gptpar::error_in(steps, num_steps, ranges, num_ranges, isa)) return error;
  const std::vector<GptparAdamStep> kept(steps, steps + num_steps);
  const auto pieces = gptpar::within(group_ranges, count, ranges, num_ranges);
  return gptpar::of_this_process<gptpar::JobQueue>().submit(
      [=] { return gptpar::take(kept.data(), pieces, threads, isa); });
} catch (const std::bad_alloc&) {
  return gptpar::kNoMemory;
}

// Waits for an order. Returns the result of cpu_adam_step, and the order's begin and end; a ticket can be used once.
// Without `block`, returns kNotYet if the order is not done.
int32_t cpu_adam_wait(int64_t ticket, int32_t block, double* begin, double* end) {
  gptpar::JobQueue& queue = gptpar::of_this_process<gptpar::JobQueue>();
  if (!block && !queue.is_done(ticket)) return gptpar::kNotYet;
  const gptpar::Done done = queue.wait(ticket);
  *begin = done.begin;
  *end = done.end;
  return done.code;
}

// Wakes sleeping threads for an order that will come in a moment.
void cpu_adam_wake() { gptpar::of_this_process<gptpar::ThreadPool>().rouse(); }

// Sum of the squares of n gradients of type grad_type, in double precision. Returns 1 or a negative Error.
int32_t cpu_adam_square(const void* grad, int64_t n, int32_t grad_type, int32_t threads, int32_t isa, double* sum) try {
  const gptpar::Loops* loops = gptpar::loops_of(isa);
  if (!loops) return gptpar::kNoSuchSet;
  if (!gptpar::known(grad_type)) return gptpar::kNoSuchType;
  const auto square = loops->square[grad_type - 1];
  const GptparGroupRange whole{0, n, 0};
  const gptpar::Blocks blocks(&whole, 1, 0);
  std::vector<double> parts(blocks.count());
  gptpar::of_this_process<gptpar::ThreadPool>().run(blocks.count(), threads, [&](int64_t block) {
    const gptpar::GroupRange* const piece = blocks.begin(block);  // the only one: there is one range
    parts[block] = square(grad, piece->start, piece->stop);
  });
  *sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  return 1;
} catch (const std::bad_alloc&) {
  return gptpar::kNoMemory;
}

// Like cpu_adam_square, in the background, as cpu_adam_order does. `sum` has its value when the order is done.
int64_t cpu_adam_order_square(const void* grad, int64_t n, int32_t grad_type, int32_t threads, int32_t isa,
                              double* sum) try {
  return gptpar::of_this_process<gptpar::JobQueue>().submit(
      [=] { return cpu_adam_square(grad, n, grad_type, threads, isa, sum); });
} catch (const std::bad_alloc&) {
  return gptpar::kNoMemory;
}

}  // extern "C"
