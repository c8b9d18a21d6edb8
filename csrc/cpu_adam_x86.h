// The operations of cpu_adam_scalar.h on 8 and 16 floats at a time, with the same results bit for bit.

#pragma once

#include <immintrin.h>

#include "cpu_adam_scalar.h"

#define GPTPAR_AVX2 __attribute__((target("avx2,fma,f16c")))
#define GPTPAR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))

namespace gptpar {

#define GPTPAR_OP static GPTPAR_AVX2 GPTPAR_INLINE

struct Avx2 {
  static constexpr int width = 8;
  using Floats = __m256;
  using Bits = __m256i;
  using Marks = __m256i;
  struct Sums {
    __m256d part[4];
  };

  GPTPAR_OP Floats all(float x) { return _mm256_set1_ps(x); }
  GPTPAR_OP Floats load(const float* x) { return _mm256_loadu_ps(x); }
  GPTPAR_OP Floats load(const Bfloat* x) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  GPTPAR_OP Floats load(const Half* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  GPTPAR_OP void store(float* out, Floats x, bool stream) {
    stream ? _mm256_stream_ps(out, x) : _mm256_storeu_ps(out, x);
  }
  GPTPAR_OP void store_bits(void* out, __m128i bits, bool stream) {
    __m128i* place = static_cast<__m128i*>(out);
    stream ? _mm_stream_si128(place, bits) : _mm_storeu_si128(place, bits);
  }
  GPTPAR_OP void store(Bfloat* out, Floats x, bool stream) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    store_rounded(out, x, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd), stream);
  }
  // Adds to the bits and cuts off the lower half.
  GPTPAR_OP void store_rounded(Bfloat* out, Floats x, Bits added, bool stream) {
    const __m256i up = _mm256_add_epi32(_mm256_castps_si256(x), added);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i top = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
    store_bits(out, _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1)), stream);
  }
  GPTPAR_OP void store(Half* out, Floats x, bool stream) {
    store_bits(out, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), stream);
  }
  GPTPAR_OP Bits draws(Floats m, Floats v, Bits key) {
    const Bits first = _mm256_and_si256(_mm256_castps_si256(m), _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    Bits x = _mm256_or_si256(first, _mm256_srli_epi32(_mm256_castps_si256(v), 16));
    x = _mm256_xor_si256(x, key);
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), _mm256_set1_epi32(static_cast<int>(kFirst)));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), _mm256_set1_epi32(static_cast<int>(kSecond)));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
  }
  GPTPAR_OP Bits word(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  GPTPAR_OP Bits load_bits(const Eight* x) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  }
  GPTPAR_OP void store_bits(Eight* out, Bits x) {
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
  }
  GPTPAR_OP Bits bits(Floats x) { return _mm256_castps_si256(x); }
  GPTPAR_OP Floats floats(Bits x) { return _mm256_castsi256_ps(x); }
  GPTPAR_OP Bits both(Bits a, Bits b) { return _mm256_and_si256(a, b); }
  GPTPAR_OP Bits either(Bits a, Bits b) { return _mm256_or_si256(a, b); }
  GPTPAR_OP Bits differ(Bits a, Bits b) { return _mm256_xor_si256(a, b); }
  GPTPAR_OP Bits plus(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
  GPTPAR_OP Bits minus(Bits a, Bits b) { return _mm256_sub_epi32(a, b); }
  template <int count>
  GPTPAR_OP Bits left(Bits x) { return _mm256_slli_epi32(x, count); }
  template <int count>
  GPTPAR_OP Bits right(Bits x) { return _mm256_srli_epi32(x, count); }
  GPTPAR_OP Bits least(Bits a, Bits b) { return _mm256_min_epu32(a, b); }
  GPTPAR_OP Bits most(Bits a, Bits b) { return _mm256_max_epu32(a, b); }
  GPTPAR_OP Bits unless_zero(Bits test, Bits x) {
    return _mm256_andnot_si256(_mm256_cmpeq_epi32(test, _mm256_setzero_si256()), x);
  }
  GPTPAR_OP Bits lower(Bits x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xffff)); }
  GPTPAR_OP Bits upper(Bits x) { return _mm256_srli_epi32(x, 16); }
  GPTPAR_OP Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  GPTPAR_OP Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  GPTPAR_OP Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  GPTPAR_OP Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  GPTPAR_OP Floats root(Floats a) { return _mm256_sqrt_ps(a); }
  GPTPAR_OP Marks no_marks() { return _mm256_setzero_si256(); }
  GPTPAR_OP Marks mark(Marks marks, Floats x) { return _mm256_or_si256(marks, _mm256_castps_si256(x)); }
  GPTPAR_OP bool any(Marks marks) { return !_mm256_testz_si256(marks, marks); }
  GPTPAR_OP void clear(Sums& sums) { sums.part[0] = sums.part[1] = sums.part[2] = sums.part[3] = _mm256_setzero_pd(); }
  GPTPAR_OP void add_square(Sums& sums, int j, Floats x) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    sums.part[2 * j] = _mm256_fmadd_pd(low, low, sums.part[2 * j]);
    sums.part[2 * j + 1] = _mm256_fmadd_pd(high, high, sums.part[2 * j + 1]);
  }
  GPTPAR_OP void spill(const Sums& sums, double* lanes) {
    for (int k = 0; k < 4; ++k) _mm256_storeu_pd(lanes + 4 * k, sums.part[k]);
  }
};

#undef GPTPAR_OP
#define GPTPAR_OP static GPTPAR_AVX512 GPTPAR_INLINE

struct Avx512 {
  static constexpr int width = 16;
  using Floats = __m512;
  using Bits = __m512i;
  using Marks = __m512i;
  struct Sums {
    __m512d part[2];
  };

  GPTPAR_OP Floats all(float x) { return _mm512_set1_ps(x); }
  GPTPAR_OP Floats load(const float* x) { return _mm512_loadu_ps(x); }
  GPTPAR_OP Floats load(const Bfloat* x) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  GPTPAR_OP Floats load(const Half* x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  GPTPAR_OP void store(float* out, Floats x, bool stream) {
    stream ? _mm512_stream_ps(out, x) : _mm512_storeu_ps(out, x);
  }
  GPTPAR_OP void store_bits(void* out, __m256i bits, bool stream) {
    __m256i* place = static_cast<__m256i*>(out);
    stream ? _mm256_stream_si256(place, bits) : _mm256_storeu_si256(place, bits);
  }
  // Not vcvtneps2bf16: it treats denormals as zero.
  GPTPAR_OP void store(Bfloat* out, Floats x, bool stream) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    store_rounded(out, x, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd), stream);
  }
  // Adds to the bits and cuts off the lower half.
  GPTPAR_OP void store_rounded(Bfloat* out, Floats x, Bits added, bool stream) {
    const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), added);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i top = _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, _mm512_set1_epi32(0x7fc0));
    store_bits(out, _mm512_cvtepi32_epi16(top), stream);
  }
  GPTPAR_OP void store(Half* out, Floats x, bool stream) {
    store_bits(out, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), stream);
  }
  GPTPAR_OP Bits draws(Floats m, Floats v, Bits key) {
    const Bits first = _mm512_and_si512(_mm512_castps_si512(m), _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    Bits x = _mm512_or_si512(first, _mm512_srli_epi32(_mm512_castps_si512(v), 16));
    x = _mm512_xor_si512(x, key);
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(static_cast<int>(kFirst)));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)), _mm512_set1_epi32(static_cast<int>(kSecond)));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  }
  GPTPAR_OP Bits word(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  GPTPAR_OP Bits load_bits(const Eight* x) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  GPTPAR_OP void store_bits(Eight* out, Bits x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(x));
  }
  GPTPAR_OP Bits bits(Floats x) { return _mm512_castps_si512(x); }
  GPTPAR_OP Floats floats(Bits x) { return _mm512_castsi512_ps(x); }
  GPTPAR_OP Bits both(Bits a, Bits b) { return _mm512_and_si512(a, b); }
  GPTPAR_OP Bits either(Bits a, Bits b) { return _mm512_or_si512(a, b); }
  GPTPAR_OP Bits differ(Bits a, Bits b) { return _mm512_xor_si512(a, b); }
  GPTPAR_OP Bits plus(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
  GPTPAR_OP Bits minus(Bits a, Bits b) { return _mm512_sub_epi32(a, b); }
  template <int count>
  GPTPAR_OP Bits left(Bits x) { return _mm512_slli_epi32(x, count); }
  template <int count>
  GPTPAR_OP Bits right(Bits x) { return _mm512_srli_epi32(x, count); }
  GPTPAR_OP Bits least(Bits a, Bits b) { return _mm512_min_epu32(a, b); }
  GPTPAR_OP Bits most(Bits a, Bits b) { return _mm512_max_epu32(a, b); }
  GPTPAR_OP Bits unless_zero(Bits test, Bits x) {
    return _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(test, test), x);
  }
  GPTPAR_OP Bits lower(Bits x) { return _mm512_and_si512(x, _mm512_set1_epi32(0xffff)); }
  GPTPAR_OP Bits upper(Bits x) { return _mm512_srli_epi32(x, 16); }
  GPTPAR_OP Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  GPTPAR_OP Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  GPTPAR_OP Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  GPTPAR_OP Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  GPTPAR_OP Floats root(Floats a) { return _mm512_sqrt_ps(a); }
  GPTPAR_OP Marks no_marks() { return _mm512_setzero_si512(); }
  GPTPAR_OP Marks mark(Marks marks, Floats x) { return _mm512_or_si512(marks, _mm512_castps_si512(x)); }
  GPTPAR_OP bool any(Marks marks) { return _mm512_test_epi32_mask(marks, marks) != 0; }
  GPTPAR_OP void clear(Sums& sums) { sums.part[0] = sums.part[1] = _mm512_setzero_pd(); }
  GPTPAR_OP void add_square(Sums& sums, int, Floats x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    sums.part[0] = _mm512_fmadd_pd(low, low, sums.part[0]);
    sums.part[1] = _mm512_fmadd_pd(high, high, sums.part[1]);
  }
  GPTPAR_OP void spill(const Sums& sums, double* lanes) {
    for (int k = 0; k < 2; ++k) _mm512_storeu_pd(lanes + 8 * k, sums.part[k]);
  }
};

#undef GPTPAR_OP

}  // namespace gptpar
