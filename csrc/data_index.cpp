// Order of samples: numpy's legacy RandomState.shuffle and Megatron's blending rule, both value for value.
// Plain C ABI, loaded with ctypes.

#include <cstddef>
#include <cstdint>
#include <utility>

// A fused multiply-add in the blending rule would break ties differently from plain float64 arithmetic.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace {

constexpr int kState = 624, kShift = 397;
constexpr int kBatch = 256;  // swaps in flight: enough draws between a prefetch and its use to hide memory latency

struct Twister {  // MT19937 (Matsumoto and Nishimura 1998) on numpy's own state array
  uint32_t* key;
  int position;

  void refill() {
    auto twist = [](uint32_t high, uint32_t low) {
      return (((high & 0x80000000u) | (low & 0x7fffffffu)) >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
    };
    for (int i = 0; i < kState - kShift; ++i) key[i] = key[i + kShift] ^ twist(key[i], key[i + 1]);
    for (int i = kState - kShift; i < kState - 1; ++i) key[i] = key[i + kShift - kState] ^ twist(key[i], key[i + 1]);
    key[kState - 1] = key[kShift - 1] ^ twist(key[kState - 1], key[0]);
    position = 0;
  }

  uint32_t next() {
    if (position == kState) refill();
    uint32_t y = key[position++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }

  uint64_t next_wide() {
    uint64_t high = next();
    return high << 32 | next();
  }
};

uint64_t mask_for(uint64_t limit) {  // smallest 2^k - 1 that is >= limit > 0
  return ~uint64_t{0} >> __builtin_clzll(limit);
}

// Draws targets[t] uniformly from [0, top - t] by masked rejection. The mask must be the same for all of them. The
// accepted count advances without a branch, since whether a draw is accepted cannot be predicted.
template <typename T>
void draw(Twister& random, uint64_t top, uint64_t mask, int count, uint64_t* targets, const T* values) {
  const bool wide = top > 0xffffffffu;
  for (int t = 0; t < count;) {
    uint64_t value = (wide ? random.next_wide() : random.next()) & mask;
    targets[t] = value;
    __builtin_prefetch(values + value, 1);
    t += value <= top - t;
  }
}

// Swaps x[i] with a random earlier or equal element, for i from n - 1 down to 1. Targets of the next batch are drawn
// and prefetched while the current batch is swapped.
template <typename T>
void shuffle(T* x, uint64_t n, uint32_t* key, int32_t* position) {
  Twister random{key, *position};
  uint64_t buffers[2][kBatch];
  uint64_t* ready = buffers[0];
  uint64_t* drawn = buffers[1];
  uint64_t ready_top = 0;
  int ready_count = 0;
  for (uint64_t top = n - 1; n > 1;) {
    int count = 0;
    if (top > 0) {
      uint64_t mask = mask_for(top);
      uint64_t same_mask = top - (mask >> 1);  // tops down to mask / 2 + 1, which also keeps 32- and 64-bit draws apart
      count = same_mask < kBatch ? static_cast<int>(same_mask) : kBatch;
      draw(random, top, mask, count, drawn, x);
    }
    for (int t = 0; t < ready_count; ++t) std::swap(x[ready_top - t], x[ready[t]]);
    if (count == 0) break;
    std::swap(ready, drawn);
    ready_top = top;
    ready_count = count;
    top -= count;
  }
  *position = random.position;
}

}  // namespace

extern "C" {

// values: n items of `itemsize` bytes; key: 624 words, position: both updated as RandomState.shuffle leaves them.
// Returns 0, or -1 for an item size it does not know.
int32_t data_index_shuffle(void* values, uint64_t n, int32_t itemsize, uint32_t* key, int32_t* position) {
  switch (itemsize) {
    case 1: shuffle(static_cast<uint8_t*>(values), n, key, position); return 0;
    case 2: shuffle(static_cast<uint16_t*>(values), n, key, position); return 0;
    case 4: shuffle(static_cast<uint32_t*>(values), n, key, position); return 0;
    case 8: shuffle(static_cast<uint64_t*>(values), n, key, position); return 0;
    default: return -1;
  }
}

// Sample k of a blend goes to the data set with the largest weight * max(k, 1) - count (the first of equals) among
// those whose count is below their limit. Continues at sample `start` with the counts given, which it advances.
// choices and indices (either both null or `size` long) take the data set and the index inside it.
// Returns the number of samples placed: fewer than size when every data set has reached its limit.
int64_t data_index_blend(const double* weights, const int64_t* limits, int32_t num_sets, int64_t start, int64_t size,
                         int64_t* counts, int16_t* choices, int64_t* indices) {
  for (int64_t done = 0; done < size; ++done) {
    int64_t k = start + done;
    double position = k > 1 ? static_cast<double>(k) : 1.0;
    int32_t best = -1;
    double best_error = 0;
    for (int32_t j = 0; j < num_sets; ++j) {
      double error = weights[j] * position - static_cast<double>(counts[j]);
      if (counts[j] < limits[j] && (best < 0 || error > best_error)) {
        best = j;
        best_error = error;
      }
    }
    if (best < 0) return done;
    if (choices) {
      choices[done] = static_cast<int16_t>(best);
      indices[done] = counts[best];
    }
    ++counts[best];
  }
  return size;
}

}  // extern "C"
