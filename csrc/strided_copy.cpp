// Copies a box of elements between two memories with any strides, between fp32 and bf16 if asked, on one thread.
// Plain C ABI, loaded with ctypes.
//
// Threads that read and write files each copy a piece at a time. torch's copies would start a team of threads in each of
// them, and take a transposed matrix element by element across lines of the processor's caches.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kMaxDims = 64;
constexpr int64_t kTile = 32;  // a tile of both memories together stays in the first cache

struct Dim {
  int64_t size, to, from;  // strides in elements
};

struct Box {
  Dim dims[kMaxDims];
  int count = 0;

  // Dims from the widest stride of the target to the narrowest; those that follow each other in both memories are one.
  Box(int num_dims, const int64_t* sizes, const int64_t* to, const int64_t* from) {
    Dim all[kMaxDims];
    int used = 0;
    for (int i = 0; i < num_dims; ++i)
      if (sizes[i] != 1) all[used++] = {sizes[i], to[i], from[i]};
    std::stable_sort(all, all + used, [](const Dim& a, const Dim& b) { return a.to > b.to; });
    for (int i = 0; i < used; ++i) {
      Dim* last = count ? &dims[count - 1] : nullptr;
      if (last && last->to == all[i].to * all[i].size && last->from == all[i].from * all[i].size)
        *last = {last->size * all[i].size, all[i].to, all[i].from};
      else
        dims[count++] = all[i];
    }
  }

  // Takes a dim out; one element if there is none.
  Dim take(int index) {
    if (index < 0) return {1, 1, 1};
    const Dim taken = dims[index];
    std::copy(dims + index + 1, dims + count, dims + index);
    --count;
    return taken;
  }
};

#define GPTPAR_INLINE inline __attribute__((always_inline))

struct Same {
  template <class T>
  static GPTPAR_INLINE void row(T* to, const T* from, int64_t size) {
    std::memcpy(to, from, size * sizeof(T));
  }
  template <class T>
  static GPTPAR_INLINE T one(T value) {
    return value;
  }
};

struct Rounded {
  static GPTPAR_INLINE uint16_t one(uint32_t bits) {  // to nearest even; a NaN stays one
    const uint32_t up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : up);
  }
  static GPTPAR_INLINE void row(uint16_t* to, const uint32_t* from, int64_t size) {
    for (int64_t i = 0; i < size; ++i) to[i] = one(from[i]);
  }
};

struct Widened {
  static GPTPAR_INLINE uint32_t one(uint16_t bits) { return uint32_t{bits} << 16; }
  static GPTPAR_INLINE void row(uint32_t* to, const uint16_t* from, int64_t size) {
    for (int64_t i = 0; i < size; ++i) to[i] = one(from[i]);
  }
};

// Transposes a tile of the source into `tile`. At the edge of the matrix it has fewer rows (`width`) or columns (`height`).
template <class T>
GPTPAR_INLINE void turn(T (&tile)[kTile][kTile], const T* from, int64_t step, int64_t height, int64_t width) {
  for (int64_t b = 0; b < width; ++b)
    for (int64_t a = 0; a < height; ++a) tile[a][b] = from[b * step + a];
}

#if defined(__x86_64__)
GPTPAR_INLINE void turn(uint32_t (&tile)[kTile][kTile], const uint32_t* from, int64_t step, int64_t height,
                        int64_t width) {
  if (height != kTile || width != kTile) return turn<uint32_t>(tile, from, step, height, width);
  for (int64_t b = 0; b < kTile; b += 4)
    for (int64_t a = 0; a < kTile; a += 4) {
      __m128 row[4];
      for (int i = 0; i < 4; ++i) row[i] = _mm_loadu_ps(reinterpret_cast<const float*>(from + (b + i) * step + a));
      _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
      for (int i = 0; i < 4; ++i) _mm_store_ps(reinterpret_cast<float*>(&tile[a + i][b]), row[i]);
    }
}
#endif

// A whole tile's line to memory that will not be read soon: past the caches, where its end is the end of a cache's line.
template <class How, class To, class From>
GPTPAR_INLINE void put_line(To* to, const From* from, int64_t size) {
#if defined(__x86_64__)
  if (size == kTile && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    alignas(64) To line[kTile];
    How::row(line, from, kTile);
    for (size_t i = 0; i < sizeof line / 16; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, reinterpret_cast<const __m128i*>(line)[i]);
    return;
  }
#endif
  How::row(to, from, size);
}

// to[i][j] = from[j][i]: `rows.from` and `line.to` are 1. The first tile ends where a line of the cache does.
template <class How, class To, class From>
GPTPAR_INLINE void transpose(To* to, const From* from, Dim rows, Dim line) {
  alignas(64) From tile[kTile][kTile];
  const int64_t head = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64 / sizeof(To) % kTile;
  for (int64_t i = 0; i < rows.size; i += kTile) {
    const int64_t height = std::min(kTile, rows.size - i);
    for (int64_t j = 0, width; j < line.size; j += width) {
      width = std::min(j == 0 && head ? head : kTile, line.size - j);
      turn(tile, from + j * line.from + i, line.from, height, width);
      for (int64_t a = 0; a < height; ++a) put_line<How>(to + (i + a) * rows.to + j, tile[a], width);
    }
  }
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// One or two dims: the last one along the target's memory, and the one along the source's if that is another.
template <class How, class To, class From>
GPTPAR_INLINE void plane(To* to, const From* from, Dim rows, Dim line) {
  if (line.from == 1 && line.to == 1) {
    for (int64_t i = 0; i < rows.size; ++i) How::row(to + i * rows.to, from + i * rows.from, line.size);
  } else if (line.to == 1 && rows.from == 1) {
    transpose<How>(to, from, rows, line);
  } else {
    for (int64_t i = 0; i < rows.size; ++i)
      for (int64_t j = 0; j < line.size; ++j)
        to[i * rows.to + j * line.to] = How::one(from[i * rows.from + j * line.from]);
  }
}

template <class How, class To, class From>
GPTPAR_INLINE void copy(void* target, const void* source, Box box) {
  const Dim line = box.take(box.count - 1);
  int along = box.count - 1;  // of the remaining dims the one along the source's memory
  for (int i = 0; i < box.count && line.from != 1; ++i)
    if (box.dims[i].from == 1) along = i;
  const Dim rows = box.take(along);
  int64_t index[kMaxDims] = {}, to = 0, from = 0;
  for (;;) {
    plane<How>(static_cast<To*>(target) + to, static_cast<const From*>(source) + from, rows, line);
    int dim = box.count - 1;
    for (; dim >= 0; --dim) {
      to += box.dims[dim].to, from += box.dims[dim].from;
      if (++index[dim] < box.dims[dim].size) break;
      to -= box.dims[dim].to * index[dim], from -= box.dims[dim].from * index[dim];
      index[dim] = 0;
    }
    if (dim < 0) return;
  }
}

void round_box(void* target, const void* source, const Box& box) { copy<Rounded, uint16_t, uint32_t>(target, source, box); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) void round_box_avx2(void* target, const void* source, const Box& box) {
  copy<Rounded, uint16_t, uint32_t>(target, source, box);
}
#endif

// Copies sizes[0] * sizes[1] * ... elements. Strides are in elements, and none is negative.
//   width: bytes of an element: 1, 2, 4 or 8; 0: from fp32 to bf16; -1: from bf16 to fp32
void copy_box(void* target, const void* source, int num_dims, const int64_t* sizes, const int64_t* to,
              const int64_t* from, int64_t width) {
  for (int i = 0; i < num_dims; ++i)
    if (sizes[i] == 0) return;
  const Box box(num_dims, sizes, to, from);
  switch (width) {
    case 0:
#if defined(__x86_64__)
      if (__builtin_cpu_supports("avx2")) return round_box_avx2(target, source, box);
#endif
      return round_box(target, source, box);
    case -1:
      return copy<Widened, uint32_t, uint16_t>(target, source, box);
    case 1:
      return copy<Same, uint8_t, uint8_t>(target, source, box);
    case 2:
      return copy<Same, uint16_t, uint16_t>(target, source, box);
    case 4:
      return copy<Same, uint32_t, uint32_t>(target, source, box);
    case 8:
      return copy<Same, uint64_t, uint64_t>(target, source, box);
  }
}

}  // namespace

// Makes `count` copies. `numbers` has for each of them: the addresses of target and source, width, number of dims, sizes,
// the target's strides, the source's strides.
extern "C" void strided_copies(const int64_t* numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t num_dims = numbers[3], *sizes = numbers + 4;
    copy_box(reinterpret_cast<void*>(numbers[0]), reinterpret_cast<const void*>(numbers[1]),
             static_cast<int>(num_dims), sizes, sizes + num_dims, sizes + 2 * num_dims, numbers[2]);
    numbers = sizes + 3 * num_dims;
  }
}
