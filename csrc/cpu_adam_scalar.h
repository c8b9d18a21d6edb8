// 16-bit floats and one-element "vectors" in plain C++: the reference for the vector paths, and the ends of vectors.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace gptpar {

enum Type : int32_t { kNone = 0, kFloat = 1, kBfloat = 2, kHalf = 3, kEight = 4 };

struct Bfloat {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
// A moment in 8 bits; what they mean differs between the first and the second one (gptpar.optim.rounded_states).
struct Eight {
  uint8_t bits;
};
constexpr uint32_t kSecondCut = 21, kSecondLow = 4 * (127 - 56), kFirstCut = 19, kFirstLow = 16 * (127 - 4);
constexpr float kFirstOffset = 1.0f / 16;
constexpr uint32_t kSize = 0x7fffffff, kInfinity = 0x7f800000;  // bits of a number without sign; those of infinity

#define GPTPAR_INLINE inline __attribute__((always_inline))

GPTPAR_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

GPTPAR_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

GPTPAR_INLINE float widen(float x) { return x; }
GPTPAR_INLINE float widen(Bfloat x) { return float_of(uint32_t{x.bits} << 16); }
GPTPAR_INLINE float widen(Half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 0x3ff;
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
  if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0));
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

// Both round to nearest, ties to even. Every NaN becomes the same bfloat; a half keeps its sign and leading bits.
GPTPAR_INLINE void narrow(float x, Bfloat* out) {
  const uint32_t bits = bits_of(x);
  out->bits = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
GPTPAR_INLINE void narrow(float x, Half* out) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  uint32_t half;
  if (size > 0x7f800000) {
    half = 0x7e00 | (size >> 13 & 0x3ff);
  } else if (size >= 0x477ff000) {  // 65520 and above round to infinity
    half = 0x7c00;
  } else if (size < 0x38800000) {  // below 2^-14: the last bit of a sum with 0.5 is worth 2^-24, as a denormal half's
    half = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
  } else {
    half = ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112u << 10);
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

// Rounds away from zero with the cut-off fraction as probability, if the 16 bits of `draw` are uniform.
GPTPAR_INLINE void narrow(float x, uint32_t draw, Bfloat* out) {
  out->bits = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits_of(x) + draw) >> 16);
}

// A permutation of 32 bits: "lowbias32" (Ellis 2018).
constexpr uint32_t kFirst = 0x7feb352d, kSecond = 0x846ca68b;
GPTPAR_INLINE uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * kFirst;
  x = (x ^ x >> 15) * kSecond;
  return x ^ x >> 16;
}

constexpr int kLine = 64;  // bytes of a cache line
constexpr int kRun = 32;   // elements whose 16-bit outputs fill a line
constexpr int kAhead = 512;  // distance of the prefetched elements from the current ones

// Prefetches the lines of kRun elements. The hardware prefetches by itself, but only within a page.
template <class T>
GPTPAR_INLINE void prefetch_lines(const T* x) {
#pragma GCC unroll 2
  for (int i = 0; i < kRun; i += kLine / sizeof(T)) __builtin_prefetch(x + i);
}
template <class First, class Second, class Grad>
GPTPAR_INLINE void prefetch(const float* p, const First* m, const Second* v, const Grad* grad) {
  prefetch_lines(p);
  prefetch_lines(m);
  prefetch_lines(v);
  prefetch_lines(grad);
}

struct Scalar {
  static constexpr int width = 1;
  using Floats = float;
  using Bits = uint32_t;
  using Marks = uint32_t;
  struct Sums {
    double lane[16];
  };

  static GPTPAR_INLINE Floats all(float x) { return x; }
  static GPTPAR_INLINE Floats load(const float* x) { return *x; }
  static GPTPAR_INLINE Floats load(const Bfloat* x) { return widen(*x); }
  static GPTPAR_INLINE Floats load(const Half* x) { return widen(*x); }
  static GPTPAR_INLINE void store(float* out, Floats x, bool) { *out = x; }
  static GPTPAR_INLINE void store(Bfloat* out, Floats x, bool) { narrow(x, out); }
  static GPTPAR_INLINE void store(Half* out, Floats x, bool) { narrow(x, out); }
  // The draws of gptpar.optim.rounded_states, from the old moments.
  static GPTPAR_INLINE Bits draws(Floats m, Floats v, Bits key) {
    return mixed(((bits_of(m) & 0xffff0000) | bits_of(v) >> 16) ^ key);
  }
  static GPTPAR_INLINE Bits word(uint32_t x) { return x; }
  static GPTPAR_INLINE Bits load_bits(const Eight* x) { return x->bits; }
  static GPTPAR_INLINE void store_bits(Eight* out, Bits x) { out->bits = static_cast<uint8_t>(x); }
  static GPTPAR_INLINE Bits bits(Floats x) { return bits_of(x); }
  static GPTPAR_INLINE Floats floats(Bits x) { return float_of(x); }
  static GPTPAR_INLINE Bits both(Bits a, Bits b) { return a & b; }
  static GPTPAR_INLINE Bits either(Bits a, Bits b) { return a | b; }
  static GPTPAR_INLINE Bits differ(Bits a, Bits b) { return a ^ b; }
  static GPTPAR_INLINE Bits plus(Bits a, Bits b) { return a + b; }
  static GPTPAR_INLINE Bits minus(Bits a, Bits b) { return a - b; }
  template <int count>
  static GPTPAR_INLINE Bits left(Bits x) { return x << count; }
  template <int count>
  static GPTPAR_INLINE Bits right(Bits x) { return x >> count; }
  static GPTPAR_INLINE Bits least(Bits a, Bits b) { return a < b ? a : b; }
  static GPTPAR_INLINE Bits most(Bits a, Bits b) { return a > b ? a : b; }
  static GPTPAR_INLINE Bits unless_zero(Bits test, Bits x) { return test ? x : 0; }
  static GPTPAR_INLINE Bits lower(Bits x) { return x & 0xffff; }
  static GPTPAR_INLINE Bits upper(Bits x) { return x >> 16; }
  static GPTPAR_INLINE void store_rounded(Bfloat* out, Floats x, Bits draw, bool) { narrow(x, draw, out); }
  static GPTPAR_INLINE Floats add(Floats a, Floats b) { return a + b; }
  static GPTPAR_INLINE Floats sub(Floats a, Floats b) { return a - b; }
  static GPTPAR_INLINE Floats mul(Floats a, Floats b) { return a * b; }
  static GPTPAR_INLINE Floats div(Floats a, Floats b) { return a / b; }
  static GPTPAR_INLINE Floats root(Floats a) { return std::sqrt(a); }
  static GPTPAR_INLINE Marks no_marks() { return 0; }
  static GPTPAR_INLINE Marks mark(Marks marks, Floats x) { return marks | bits_of(x); }
  static GPTPAR_INLINE bool any(Marks marks) { return marks != 0; }
  static GPTPAR_INLINE void clear(Sums& sums) { sums = Sums{}; }
  static GPTPAR_INLINE void add_square(Sums& sums, int j, Floats x) { sums.lane[j] += double{x} * double{x}; }
  static GPTPAR_INLINE void spill(const Sums& sums, double* lanes) { std::memcpy(lanes, sums.lane, sizeof sums.lane); }
};

}  // namespace gptpar
