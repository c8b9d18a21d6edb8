// GPT-2's byte-level BPE for the ASCII parts of a text; English and code are mostly ASCII.
// Plain C ABI, loaded with ctypes.
//
// Cutting follows GPT-2's pattern  's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// (Radford et al. 2019; its published encoder.py). Whether a character beyond ASCII is a letter depends on a version of
// Unicode. So parts next to such a character are left as gaps, and the caller's own encoder encodes them.

#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace {

enum Class : uint8_t { kLetter, kDigit, kSpace, kOther, kHigh };

constexpr int64_t kShort = 15;         // bytes of the longest piece that the cache keeps
constexpr int64_t kLongest = 256;      // a longer piece is a gap: merging below is quadratic in its length
constexpr int64_t kQuiet = 32;         // ASCII bytes that must follow a gap, so that gaps are few
constexpr int kCacheBits = 14;         // 16,384 entries of 48 bytes: they stay in a core's own cache
constexpr uint32_t kNoRank = ~uint32_t{0};
constexpr int kKept = 6;               // tokens of a cached piece

struct Classes {
  uint8_t of[256];
  constexpr Classes() : of() {
    for (int c = 0; c < 256; ++c) {
      const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
      const bool space = c == ' ' || (c >= '\t' && c <= '\r');
      of[c] = c >= 128 ? kHigh : letter ? kLetter : c >= '0' && c <= '9' ? kDigit : space ? kSpace : kOther;
    }
  }
};
constexpr Classes kClasses;

inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a ^ 0x9e3779b97f4a7c15u) * (b ^ 0xe7037ed1a0b428dbu);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// The bytes of every token, in a hash table with open addressing.
class Vocabulary {
 public:
  Vocabulary(const uint8_t* bytes, const int64_t* ends, const uint32_t* ids, int64_t count)
      : bytes_(bytes, bytes + (count ? ends[count - 1] : 0)) {
    uint64_t size = 16;
    while (size < 2 * static_cast<uint64_t>(count)) size *= 2;
    slots_.resize(size);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t start = t ? ends[t - 1] : 0;
      const auto length = static_cast<uint32_t>(ends[t] - start);
      uint64_t at = hash(bytes_.data() + start, length) & (size - 1);
      while (slots_[at].length) at = (at + 1) & (size - 1);
      slots_[at] = {static_cast<uint32_t>(start), length, ids[t]};
    }
  }

  uint32_t rank(const uint8_t* piece, int64_t length) const {
    for (uint64_t at = hash(piece, length);; ++at) {
      const Slot& slot = slots_[at & (slots_.size() - 1)];
      if (!slot.length) return kNoRank;
      if (slot.length == length && !std::memcmp(&bytes_[slot.start], piece, length)) return slot.id;
    }
  }

 private:
  struct Slot {
    uint32_t start = 0, length = 0, id = 0;  // length 0: empty
  };

  static uint64_t hash(const uint8_t* piece, int64_t length) {
    uint64_t state = static_cast<uint64_t>(length), word;
    for (; length >= 8; piece += 8, length -= 8) {
      std::memcpy(&word, piece, 8);
      state = mix(state, word);
    }
    word = 0;
    std::memcpy(&word, piece, length);
    return mix(state, word);
  }

  std::vector<uint8_t> bytes_;
  std::vector<Slot> slots_;
};

struct Gap {  // bytes [start, end) of the texts; their tokens belong before out[token]
  int64_t start, end, token, text;
};

struct Entry {
  uint64_t low = 0, high = 0;  // the piece's bytes, and its length in the last one; no piece is all zero
  uint32_t count = 0, ids[kKept] = {};
};
using Cache = std::vector<Entry>;  // recent short pieces, each at the index of its hash

// Encodes texts into out and gaps, and advances both pointers; does not set a gap's `text`.
class Encoder {
 public:
  Encoder(const Vocabulary& vocabulary, Cache& cache, const uint8_t* text, uint32_t* out, Gap* gaps)
      : out(out), gaps(gaps), vocabulary_(vocabulary), cache_(cache), text_(text), first_(out) {}

  uint32_t* out;
  Gap* gaps;

  // The text that lies in bytes [i, end).
  void encode(int64_t i, int64_t end) {
    end_ = end;
    while (i < end) {
      bool high = false;
      int64_t stop = piece_end(i, high);
      if (high) stop = gap_end(stop);
      if (high || stop - i > kLongest)
        *gaps++ = {i, stop, out - first_, 0};
      else if (stop - i <= kShort)
        put_short(i, stop - i);
      else
        put(i, stop - i);
      i = stop;
    }
  }

 private:
  Class at(int64_t i) const { return static_cast<Class>(kClasses.of[text_[i]]); }

  // End of the piece that starts at i. Sets `high` if a byte beyond ASCII is there, which may belong to the piece.
  int64_t piece_end(int64_t i, bool& high) const {
    Class kind = at(i);
    int64_t j = i;
    if (text_[i] == ' ' && i + 1 < end_ && at(i + 1) != kSpace && at(i + 1) != kHigh) kind = at(++j);
    if (text_[i] == '\'') {
      const int64_t length = contraction(i);
      if (length) return i + length;
    }
    while (j < end_ && at(j) == kind && kind != kHigh) ++j;
    high = j < end_ && at(j) == kHigh;
    if (kind == kSpace && j < end_ && j - i > 1 && !high) --j;  // the last blank goes with the word after it
    return j;
  }

  int64_t contraction(int64_t i) const {
    if (i + 1 >= end_) return 0;
    const uint8_t a = text_[i + 1], b = i + 2 < end_ ? text_[i + 2] : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
  }

  // The next position after the byte beyond ASCII at i where encoding may continue: before a blank that follows another
  // ASCII character, because no piece contains both in this order.
  int64_t gap_end(int64_t i) const {
    int64_t cut = -1;
    for (; i < end_; ++i) {
      if (at(i) == kHigh)
        cut = -1;
      else if (cut >= 0 && i - cut >= kQuiet)
        return cut;
      else if (cut < 0 && at(i) == kSpace && at(i - 1) != kSpace && at(i - 1) != kHigh)
        cut = i;
    }
    return end_;
  }

  void put_short(int64_t i, int64_t length) {
    uint64_t word[2] = {0, 0};
    if (i + 16 <= end_) {  // reading 16 bytes and masking is faster than reading `length`
      std::memcpy(word, text_ + i, 16);
      const uint64_t mask = ~uint64_t{0} >> (8 * (7 - (length - 1) % 8));
      if (length <= 8)
        word[0] &= mask, word[1] = 0;
      else
        word[1] &= mask;
    } else {
      std::memcpy(word, text_ + i, length);
    }
    word[1] |= static_cast<uint64_t>(length) << 56;
    Entry& entry = cache_[mix(word[0], word[1]) >> (64 - kCacheBits)];
    if (entry.low == word[0] && entry.high == word[1]) {
      std::memcpy(out, entry.ids, sizeof(entry.ids));  // all, which needs no branch: out has room for kKept more
      out += entry.count;
      return;
    }
    uint32_t* const before = out;
    put(i, length);
    const auto count = static_cast<uint32_t>(out - before);
    if (count > kKept) return;
    entry.low = word[0], entry.high = word[1], entry.count = count;
    std::memcpy(entry.ids, before, sizeof(uint32_t) * count);
  }

  void put(int64_t i, int64_t length) {
    const uint32_t whole = vocabulary_.rank(text_ + i, length);
    if (whole == kNoRank)
      merge(text_ + i, static_cast<int>(length));
    else
      *out++ = whole;
  }

  // Joins the two neighbours whose token has the lowest id (the leftmost of equals), until no two form a token.
  void merge(const uint8_t* piece, int length) {
    int starts[kLongest + 1], parts = length;
    uint32_t ranks[kLongest];  // of parts k and k + 1 together
    for (int k = 0; k <= length; ++k) starts[k] = k;
    const auto pair = [&](int k) {
      return k + 2 <= parts ? vocabulary_.rank(piece + starts[k], starts[k + 2] - starts[k]) : kNoRank;
    };
    for (int k = 0; k < parts; ++k) ranks[k] = pair(k);
    for (;;) {
      int best = 0;
      for (int k = 1; k < parts; ++k)
        if (ranks[k] < ranks[best]) best = k;
      if (ranks[best] == kNoRank) break;
      --parts;
      std::memmove(starts + best + 1, starts + best + 2, sizeof(int) * (parts - best));
      std::memmove(ranks + best, ranks + best + 1, sizeof(uint32_t) * (parts - best));
      ranks[best] = pair(best);
      if (best) ranks[best - 1] = pair(best - 1);
    }
    for (int k = 0; k < parts; ++k) *out++ = vocabulary_.rank(piece + starts[k], starts[k + 1] - starts[k]);
  }

  const Vocabulary& vocabulary_;
  Cache& cache_;
  const uint8_t* const text_;
  const uint32_t* const first_;
  int64_t end_ = 0;
};

// One table for all threads, and a cache for each running call.
class Tokenizer {
 public:
  Tokenizer(const uint8_t* bytes, const int64_t* ends, const uint32_t* ids, int64_t count)
      : vocabulary(bytes, ends, ids, count) {}

  const Vocabulary vocabulary;

  Cache take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return Cache(1 << kCacheBits);
    Cache cache = std::move(idle_.back());
    idle_.pop_back();
    return cache;
  }

  void give_back(Cache cache) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(cache));
  }

 private:
  std::mutex mutex_;
  std::vector<Cache> idle_;
};

}  // namespace

extern "C" {

// Token t is bytes[ends[t - 1], ends[t]) and has ids[t]; every single byte must be a token.
void* bpe_new(const uint8_t* bytes, const int64_t* ends, const uint32_t* ids, int64_t count) {
  return new Tokenizer(bytes, ends, ids, count);
}

void bpe_delete(void* tokenizer) { delete static_cast<Tokenizer*>(tokenizer); }

// Maximum number of gaps that bpe_encode finds in `count` texts of `size` bytes: their ends are kQuiet bytes apart.
int64_t bpe_gaps(int64_t size, int64_t count) { return size / kQuiet + 2 * count; }

// Encodes concatenated texts: text t is utf8[ends[t - 1], ends[t]). Each text that is not empty is followed by the id
// `after`, unless that is negative. `out` needs room for one token per byte, one per text, and kKept more. lengths[t]
// becomes the number of tokens of text t without those of its gaps. Any thread may call. Returns the number of gaps.
int64_t bpe_encode(void* handle, const uint8_t* utf8, const int64_t* ends, int64_t count, int64_t after, uint32_t* out,
                   int64_t* lengths, Gap* gaps) {
  Tokenizer& tokenizer = *static_cast<Tokenizer*>(handle);
  Cache cache = tokenizer.take();
  Encoder encoder(tokenizer.vocabulary, cache, utf8, out, gaps);
  for (int64_t t = 0; t < count; ++t) {
    const uint32_t* const before = encoder.out;
    Gap* gap = encoder.gaps;
    const int64_t start = t ? ends[t - 1] : 0;
    encoder.encode(start, ends[t]);
    for (; gap < encoder.gaps; ++gap) gap->text = t;
    if (after >= 0 && ends[t] > start) *encoder.out++ = static_cast<uint32_t>(after);
    lengths[t] = encoder.out - before;
  }
  tokenizer.give_back(std::move(cache));
  return encoder.gaps - gaps;
}

}  // extern "C"
