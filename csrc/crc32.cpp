// CRC-32 of zlib (the polynomial of IEEE 802.3, bits reflected) with the processor's carry-less multiplication.
// Plain C ABI, loaded with ctypes.
//
// Bytes are a polynomial over two elements; the CRC is its remainder by P. So 128 bits can be exchanged for any that
// have the same remainder: those d bits ahead of others, times x^d mod P, are added to the others. Four sums of 128 bits
// run side by side, 512 bits apart, because a multiplication takes several cycles and one can begin in each cycle.
//
// A copy that computes the CRC of what it copies reads memory once. It writes past the caches, whose lines would
// otherwise be read before they are written.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr uint32_t kPolynomial = 0xedb88320;  // without x^32; bit 31 is the coefficient of x^0

constexpr uint32_t times_x(uint32_t value) { return (value >> 1) ^ (value & 1 ? kPolynomial : 0); }

constexpr std::array<uint32_t, 256> byte_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    table[byte] = value;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = byte_table();

uint32_t plain(const uint8_t* data, size_t size, uint32_t state) {
  for (size_t i = 0; i < size; ++i) state = kTable[(state ^ data[i]) & 0xff] ^ (state >> 8);
  return state;
}

}  // namespace

#if defined(__x86_64__)
#include <immintrin.h>

#define GPTPAR_CLMUL __attribute__((target("pclmul,sse4.1")))

namespace {

// x^n mod P as a factor. The product of two reflected numbers comes out one bit too low, which the shift makes up for.
constexpr int64_t power(int n) {
  uint32_t value = uint32_t{1} << 31;
  for (int i = 0; i < n; ++i) value = times_x(value);
  return static_cast<int64_t>(uint64_t{value} << 1);
}

// 128 bits that are `Distance` bits ahead of `next` are added to it. Their first 64 bits are 64 bits further ahead, and
// the remainder's 32 bits stand at the end of 64.
template <int Distance>
GPTPAR_CLMUL inline __m128i fold(__m128i ahead, __m128i next) {
  const __m128i factors = _mm_set_epi64x(power(Distance - 32), power(Distance + 32));
  const __m128i first = _mm_clmulepi64_si128(ahead, factors, 0x00), last = _mm_clmulepi64_si128(ahead, factors, 0x11);
  return _mm_xor_si128(next, _mm_xor_si128(first, last));
}

GPTPAR_CLMUL inline __m128i load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Reads 16 bytes at `at`, and writes them to the same place of `copy` if the bytes are copied.
template <bool Copies>
GPTPAR_CLMUL inline __m128i take(const uint8_t* data, uint8_t* copy, size_t at) {
  const __m128i value = load(data + at);
  if constexpr (Copies) _mm_stream_si128(reinterpret_cast<__m128i*>(copy + at), value);
  return value;
}

// With `Copies`, `copy` begins at a multiple of 16.
template <bool Copies>
GPTPAR_CLMUL uint32_t folded(const uint8_t* data, size_t size, uint32_t state, uint8_t* copy) {
  if (size < 64) {
    if constexpr (Copies) std::memcpy(copy, data, size);
    return plain(data, size, state);
  }
  __m128i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = take<Copies>(data, copy, 16 * i);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  size_t at = 64;
  for (; at + 64 <= size; at += 64)
    for (int i = 0; i < 4; ++i) sums[i] = fold<512>(sums[i], take<Copies>(data, copy, at + 16 * i));
  __m128i sum = sums[0];
  for (int i = 1; i < 4; ++i) sum = fold<128>(sum, sums[i]);
  for (; at + 16 <= size; at += 16) sum = fold<128>(sum, take<Copies>(data, copy, at));
  alignas(16) uint8_t left[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(left), sum);
  if constexpr (Copies) {
    std::memcpy(copy + at, data + at, size - at);
    _mm_sfence();  // another processor may read the copy next
  }
  return plain(data + at, size - at, plain(left, sizeof left, 0));
}

uint32_t folded(const uint8_t* data, size_t size, uint32_t state) {
  return folded<false>(data, size, state, nullptr);
}

uint32_t copied(const uint8_t* data, size_t size, uint32_t state, uint8_t* copy) {
  const size_t before = -reinterpret_cast<uintptr_t>(copy) % 16;
  const size_t first = before < size ? before : size;
  std::memcpy(copy, data, first);
  return folded<true>(data + first, size - first, plain(data, first, state), copy + first);
}

}  // namespace

extern "C" int32_t crc32_is_fast() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

#else

namespace {
uint32_t folded(const uint8_t* data, size_t size, uint32_t state) { return plain(data, size, state); }

uint32_t copied(const uint8_t* data, size_t size, uint32_t state, uint8_t* copy) {
  std::memcpy(copy, data, size);
  return plain(data, size, state);
}
}  // namespace

extern "C" int32_t crc32_is_fast() { return 0; }

#endif

// The CRC-32 of `size` bytes that follow bytes with the CRC-32 `before` (0: none). Only where crc32_is_fast().
extern "C" uint32_t crc32_of(const uint8_t* data, uint64_t size, uint32_t before) {
  return ~folded(data, size, ~before);
}

// The same, and the bytes are copied to `target`, which does not overlap them.
extern "C" uint32_t crc32_of_copied(uint8_t* target, const uint8_t* source, uint64_t size, uint32_t before) {
  return ~copied(source, size, ~before, target);
}

// Fills `data` with the bytes at `place` of a file, `part` bytes at a time: parts that fit the processor's caches are
// still there when their CRC is computed. `crc` is that of the bytes before, and then of these too.
// Returns how many there are, fewer at the file's end, or -errno.
extern "C" int64_t crc32_of_read(int32_t file, uint8_t* data, uint64_t size, int64_t place, uint64_t part,
                                 uint32_t* crc) {
  uint64_t done = 0;
  while (done < size) {
    const ssize_t count = pread(file, data + done, std::min(part, size - done), place + static_cast<int64_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (count == 0) break;
    *crc = crc32_of(data + done, static_cast<uint64_t>(count), *crc);
    done += static_cast<uint64_t>(count);
  }
  return static_cast<int64_t>(done);
}
