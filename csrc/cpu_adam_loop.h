// The loops of cpu_adam.cpp, included once for each instruction set. VARIANT is its namespace and VECTOR its operations.
// TARGET is the function attribute that lets the compiler emit them.

namespace gptpar {
namespace VARIANT {

// A step's numbers, each broadcast to a vector.
template <class V>
struct Spread {
  typename V::Floats scale, rest1, beta2, rest2, floor, size, decay;
};

template <class V>
TARGET GPTPAR_INLINE Spread<V> spread(const Step& s) {
  return {V::all(s.scale), V::all(s.rest1), V::all(s.beta2), V::all(s.rest2),
          V::all(s.floor), V::all(s.size),  V::all(s.decay)};
}

// Moments in 8 bits, as gptpar.optim.rounded_states defines them. `kept`: bits of the second moment as it is kept.
template <class V>
TARGET GPTPAR_INLINE typename V::Bits half_exponent(typename V::Bits kept) {
  return V::template right<1>(V::plus(V::template right<23>(V::both(kept, V::word(kSize))), V::word(1)));
}

template <class V>
TARGET GPTPAR_INLINE typename V::Floats second_of_8_bits(typename V::Bits code) {
  const auto wide = V::template left<kSecondCut>(V::plus(code, V::word(kSecondLow)));
  return V::floats(V::unless_zero(code, wide));
}

template <class V>
TARGET GPTPAR_INLINE typename V::Bits second_in_8_bits(typename V::Floats v, typename V::Bits draw) {
  const auto size = V::both(V::bits(v), V::word(kSize));
  const auto least = V::word((kSecondLow + 1) << kSecondCut), most = V::word((kSecondLow + 255) << kSecondCut);
  const auto added = V::plus(V::template left<kSecondCut - 16>(draw), V::word(1 << (kSecondCut - 17)));
  const auto kept = V::plus(V::least(V::most(size, least), most), added);
  return V::unless_zero(size, V::minus(V::template right<kSecondCut>(kept), V::word(kSecondLow)));
}

template <class V>
TARGET GPTPAR_INLINE typename V::Floats first_of_8_bits(typename V::Bits code, typename V::Bits kept) {
  const auto scaled = V::template left<kFirstCut>(V::plus(V::both(code, V::word(127)), V::word(kFirstLow)));
  const auto scale = V::template left<23>(V::plus(half_exponent<V>(kept), V::word(63)));
  const auto size = V::mul(V::sub(V::floats(scaled), V::all(kFirstOffset)), V::floats(scale));
  return V::floats(V::either(V::bits(size), V::template left<24>(V::both(code, V::word(128)))));
}

template <class V>
TARGET GPTPAR_INLINE typename V::Bits first_in_8_bits(typename V::Floats m, typename V::Bits kept,
                                                      typename V::Bits draw) {
  const auto size = V::both(V::bits(m), V::word(kSize));
  const auto scale = V::template left<23>(V::minus(V::word(191), half_exponent<V>(kept)));
  const auto scaled = V::add(V::mul(V::floats(size), V::floats(scale)), V::all(kFirstOffset));
  const auto most = V::least(V::both(V::bits(scaled), V::word(kSize)), V::word((kFirstLow + 127) << kFirstCut));
  const auto added = V::plus(V::template left<kFirstCut - 16>(draw), V::word(1 << (kFirstCut - 17)));
  const auto code = V::minus(V::template right<kFirstCut>(V::plus(most, added)), V::word(kFirstLow));
  const auto is_nan = V::template right<31>(V::minus(V::word(kInfinity), size));
  const auto has_sign = V::template left<7>(V::minus(V::word(1), is_nan));
  const auto sign = V::both(V::template right<24>(V::bits(m)), has_sign);
  return V::unless_zero(V::both(kept, V::word(kSize)), V::either(code, sign));
}

template <class V, class Second>
TARGET GPTPAR_INLINE typename V::Floats load_second(const void* v, int64_t i) {
  const Second* const at = static_cast<const Second*>(v) + i;
  if constexpr (std::is_same_v<Second, Eight>) return second_of_8_bits<V>(V::load_bits(at));
  else return V::load(at);
}

template <class V, class First>
TARGET GPTPAR_INLINE typename V::Floats load_first(const void* m, int64_t i, typename V::Floats v) {
  const First* const at = static_cast<const First*>(m) + i;
  if constexpr (std::is_same_v<First, Eight>) return first_of_8_bits<V>(V::load_bits(at), V::bits(v));
  else return V::load(at);
}

// What a vector of elements becomes. `draws` round the moments that are kept in 16 or 8 bits.
template <class V>
struct Fresh {
  typename V::Floats p, m, v;
  typename V::Bits draws;
};

// Updates elements [i, i + V::width), and stores what is kept in 32 bits. Operations E1 to E4 of
// gptpar.optim.adam_update: every product, sum, quotient and root is rounded by itself and in this order, at any width.
template <class V, class Grad, class First, class Second>
TARGET GPTPAR_INLINE Fresh<V> advance(const Step& s, const Spread<V>& k, int64_t i, bool stream,
                                      typename V::Marks& marks) {
  auto g = V::load(static_cast<const Grad*>(s.grad) + i);
  marks = V::mark(marks, V::sub(g, g));  // +0, whose bits are all clear, unless g is infinite or NaN
  g = V::mul(g, k.scale);
  const auto v = load_second<V, Second>(s.v, i);
  const auto m = load_first<V, First>(s.m, i, v);
  const auto p = V::load(s.p + i);
  const auto m_new = V::add(m, V::mul(k.rest1, V::sub(g, m)));
  const auto v_new = V::add(V::mul(k.beta2, v), V::mul(V::mul(k.rest2, g), g));
  const auto change = V::mul(k.size, V::div(m_new, V::add(V::root(v_new), k.floor)));
  const auto p_new = V::sub(V::mul(k.decay, p), change);
  if constexpr (!kIsRounded<First>) V::store(static_cast<float*>(s.m_out) + i, m_new, stream);
  if constexpr (!kIsRounded<Second>) V::store(static_cast<float*>(s.v_out) + i, v_new, stream);
  V::store(s.p_out + i, p_new, stream);
  typename V::Bits draws{};
  if constexpr (kIsEight<First> || kIsEight<Second>) draws = V::draws(m, v, V::differ(V::word(s.key), V::bits(p)));
  else if constexpr (kIsRounded<First> || kIsRounded<Second>) draws = V::draws(m, v, V::word(s.key));
  return {p_new, m_new, v_new, draws};
}

// The bits of the new second moment as it is kept, without its sign; a NaN has the exponent of infinity.
template <class V, class Second>
TARGET GPTPAR_INLINE typename V::Bits kept_second(const Fresh<V>& fresh) {
  const auto draw = V::upper(fresh.draws);
  if constexpr (kIsEight<Second>) return V::bits(second_of_8_bits<V>(second_in_8_bits<V>(fresh.v, draw)));
  const auto size = V::least(V::both(V::bits(fresh.v), V::word(kSize)), V::word(kInfinity));
  return kIsRounded<Second> ? V::both(V::plus(size, draw), V::word(0xffff0000)) : size;
}

template <class V, int count>
TARGET GPTPAR_INLINE void store_low(const Step& s, const typename V::Floats* fresh, int64_t i, bool stream) {
#pragma GCC unroll 4
  for (int j = 0; j < count; ++j) {
    const int64_t at = i + j * V::width;
    switch (s.low_type) {  // the same for every element, so the processor predicts the branch
      case kFloat: V::store(static_cast<float*>(s.low) + at, fresh[j], stream); break;
      case kBfloat: V::store(static_cast<Bfloat*>(s.low) + at, fresh[j], stream); break;
      case kHalf: V::store(static_cast<Half*>(s.low) + at, fresh[j], stream); break;
    }
  }
}

// Updates `count` vectors from element i on, and stores their 16-bit outputs together. A store that bypasses the caches
// waits in a buffer until its line is full; half-full lines would take the buffers of the other outputs.
template <class V, class Grad, class First, class Second, int count>
TARGET GPTPAR_INLINE void advance_run(const Step& s, const Spread<V>& k, int64_t i, Streams streams,
                                      typename V::Marks& marks) {
  Fresh<V> fresh[count];
  typename V::Floats p[count];
#pragma GCC unroll 4
  for (int j = 0; j < count; ++j) {
    fresh[j] = advance<V, Grad, First, Second>(s, k, i + j * V::width, streams.state, marks);
    p[j] = fresh[j].p;
  }
  if constexpr (kIsRounded<First>) {
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j) {
      First* const out = static_cast<First*>(s.m_out) + i + j * V::width;
      const auto draw = V::lower(fresh[j].draws);
      const auto kept = kept_second<V, Second>(fresh[j]);
      if constexpr (kIsEight<First>) V::store_bits(out, first_in_8_bits<V>(fresh[j].m, kept, draw));
      else V::store_rounded(out, fresh[j].m, draw, streams.state);
    }
  }
  if constexpr (kIsRounded<Second>) {
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j) {
      Second* const out = static_cast<Second*>(s.v_out) + i + j * V::width;
      const auto draw = V::upper(fresh[j].draws);
      if constexpr (kIsEight<Second>) V::store_bits(out, second_in_8_bits<V>(fresh[j].v, draw));
      else V::store_rounded(out, fresh[j].v, draw, streams.state);
    }
  }
  store_low<V, count>(s, p, i, streams.low);
}

template <class V, class Grad, int count>
TARGET GPTPAR_INLINE void blend_run(const Step& s, const Spread<V>& k, int64_t i, bool stream,
                                    typename V::Marks& marks) {
  typename V::Floats fresh[count];
#pragma GCC unroll 4
  for (int j = 0; j < count; ++j) {
    const int64_t at = i + j * V::width;
    auto g = V::load(static_cast<const Grad*>(s.grad) + at);
    marks = V::mark(marks, V::sub(g, g));
    g = V::mul(k.rest1, V::mul(g, k.scale));
    const auto p_new = V::add(V::mul(k.decay, V::load(s.p + at)), g);
    V::store(s.p_out + at, p_new, false);
    fresh[j] = s.ahead ? V::add(g, V::mul(k.decay, p_new)) : p_new;
  }
  store_low<V, count>(s, fresh, i, stream);
}

// Updates elements [first, last). The same thread's next elements begin at `next`, for prefetching.
template <class Grad, class First, class Second>
TARGET bool adam(const Step& s, int64_t first, int64_t last, int64_t next) {
  Streams streams;
  int64_t i = first;
  const int64_t head = std::min(last, first + elements_to_alignment(s, first, &streams));
  const auto one = spread<Scalar>(s);
  const auto many = spread<VECTOR>(s);
  auto mark = Scalar::no_marks();
  auto marks = VECTOR::no_marks();
  for (; i < head; ++i) advance_run<Scalar, Grad, First, Second, 1>(s, one, i, Streams{}, mark);
  for (; i + kRun <= last; i += kRun) {
    const int64_t ahead = i + kAhead + (i + kAhead < last ? 0 : next - last);
    prefetch(s.p + ahead, static_cast<const First*>(s.m) + ahead, static_cast<const Second*>(s.v) + ahead,
             static_cast<const Grad*>(s.grad) + ahead);
    advance_run<VECTOR, Grad, First, Second, kRun / VECTOR::width>(s, many, i, streams, marks);
  }
  for (; i < last; ++i) advance_run<Scalar, Grad, First, Second, 1>(s, one, i, Streams{}, mark);
  return !Scalar::any(mark) && !VECTOR::any(marks);
}

// As adam, but p = decay * p + rest1 * g alone, with g = scale * grad. With `ahead` the low outputs are not the new p, but
// rest1 * g + decay * p (Nesterov). A product with a negative rest1 and a sum round as a product and a difference do.
template <class Grad>
TARGET bool blend(const Step& s, int64_t first, int64_t last, int64_t next) {
  Streams streams;
  int64_t i = first;
  const int64_t head = std::min(last, first + elements_to_alignment(s, first, &streams));
  const auto one = spread<Scalar>(s);
  const auto many = spread<VECTOR>(s);
  auto mark = Scalar::no_marks();
  auto marks = VECTOR::no_marks();
  for (; i < head; ++i) blend_run<Scalar, Grad, 1>(s, one, i, false, mark);
  for (; i + kRun <= last; i += kRun) {
    const int64_t ahead = i + kAhead + (i + kAhead < last ? 0 : next - last);
    prefetch_lines(s.p + ahead);
    prefetch_lines(static_cast<const Grad*>(s.grad) + ahead);
    blend_run<VECTOR, Grad, kRun / VECTOR::width>(s, many, i, streams.low, marks);
  }
  for (; i < last; ++i) blend_run<Scalar, Grad, 1>(s, one, i, false, mark);
  return !Scalar::any(mark) && !VECTOR::any(marks);
}

// Element i of the block is added to lane i % 16, so that the sum depends on neither width nor number of threads.
// The square of an fp32 number is exact in double precision: fused or not makes no difference.
template <class Grad>
TARGET double square(const void* data, int64_t first, int64_t last) {
  const Grad* grad = static_cast<const Grad*>(data);
  typename VECTOR::Sums sums;
  VECTOR::clear(sums);
  int64_t i = first;
  for (; i + 16 <= last; i += 16) {
#pragma GCC unroll 16
    for (int j = 0; j < 16 / VECTOR::width; ++j) VECTOR::add_square(sums, j, VECTOR::load(grad + i + j * VECTOR::width));
  }
  double lanes[16];
  VECTOR::spill(sums, lanes);
  for (int j = 0; i < last; ++i, ++j) {
    const double x = Scalar::load(grad + i);
    lanes[j] += x * x;
  }
  for (int half = 8; half; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

}  // namespace VARIANT
}  // namespace gptpar

#undef VARIANT
#undef VECTOR
#undef TARGET
