// The loops of cpu_adam.cpp, included once for each instruction set with VARIANT (namespace), VECTOR (its operations)
// and TARGET (the attribute that every function needs that is to use them).

namespace gptpar {
namespace VARIANT {

// A call's numbers, spread over vectors.
template <class V>
struct Spread {
  typename V::Floats scale, rest1, beta2, rest2, root, eps, step, decay;
};

template <class V>
TARGET GPTPAR_INLINE Spread<V> spread(const Step& s) {
  return {V::all(s.scale), V::all(s.rest1), V::all(s.beta2), V::all(s.rest2),
          V::all(s.root),  V::all(s.eps),   V::all(-s.step), V::all(s.decay)};
}

// Elements [i, i + V::width). Every operation rounds once and in this order, whatever the width.
template <class V, class Grad>
TARGET GPTPAR_INLINE void advance(const Step& s, const Spread<V>& k, int64_t i, Streams streams,
                                  typename V::Marks& marks) {
  const Grad* grad = static_cast<const Grad*>(s.grad) + i;
  if (!streams.state) prefetch<V>(s.p + i, s.m + i, s.v + i, grad);  // out of place it costs 2 % instead
  auto g = V::load(grad);
  marks = V::mark(marks, V::sub(g, g));  // +0, whose bits are all clear, unless g is infinite or NaN
  g = s.multiply ? V::mul(g, k.scale) : V::div(g, k.scale);
  const auto m = V::load(s.m + i);
  const auto m_new = V::fma(k.rest1, V::sub(g, m), m);
  const auto v_new = V::fma(V::mul(k.rest2, g), g, V::mul(k.beta2, V::load(s.v + i)));
  const auto denominator = V::add(V::div(V::root(v_new), k.root), k.eps);
  const auto p_new = V::fma(k.step, V::div(m_new, denominator), V::mul(k.decay, V::load(s.p + i)));
  V::store(s.m_out + i, m_new, streams.state);
  V::store(s.v_out + i, v_new, streams.state);
  V::store(s.p_out + i, p_new, streams.state);
  switch (s.low_type) {  // the same way for every element, so the processor foresees it
    case kFloat: return V::store(static_cast<float*>(s.low) + i, p_new, streams.low);
    case kBfloat: return V::store(static_cast<Bfloat*>(s.low) + i, p_new, streams.low);
    case kHalf: return V::store(static_cast<Half*>(s.low) + i, p_new, streams.low);
  }
}

template <class Grad>
TARGET bool adam(const Step& s, int64_t first, int64_t last) {
  Streams streams;
  int64_t i = first;
  const int64_t head = std::min(last, first + elements_to_alignment(s, first, &streams));
  const auto one = spread<Scalar>(s);
  const auto many = spread<VECTOR>(s);
  auto mark = Scalar::no_marks();
  auto marks = VECTOR::no_marks();
  for (; i < head; ++i) advance<Scalar, Grad>(s, one, i, Streams{}, mark);
  for (; i + VECTOR::width <= last; i += VECTOR::width) advance<VECTOR, Grad>(s, many, i, streams, marks);
  for (; i < last; ++i) advance<Scalar, Grad>(s, one, i, Streams{}, mark);
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
