// Vectors cut into blocks, of which a thread takes one at a time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" {

// Elements [start, stop) of the vectors of steps[of]. gptpar.optim.cpu_adam packs the same struct.
struct GptparStretch {
  int64_t start, stop, of;
};

}  // extern "C"

namespace gptpar {

using Stretch = GptparStretch;

// Elements of a block: where blocks are alike, and where they are not.
constexpr int64_t kBlock = 1 << 16, kLargestBlock = 1 << 18, kSmallestBlock = 1 << 14;

// Stretches, which may be one vector or thousands of rows, cut and gathered.
class Blocks {
 public:
  // threads: how many share the work. Each block is a part of what is left (guided self-scheduling: Polychronopoulos and
  // Kuck 1987): large ones cost less, and small ones at the end let threads finish together. 0: all blocks but the last
  // have kBlock elements, whoever works on them.
  Blocks(const Stretch* stretches, int64_t count, int threads) {
    int64_t left = 0, room = 0;
    for (const Stretch* s = stretches; s < stretches + count; ++s) left += s->stop - s->start;
    for (const Stretch* s = stretches; s < stretches + count; ++s) {
      for (int64_t first = s->start; first < s->stop;) {
        if (room == 0) {
          begins_.push_back(pieces_.size());
          room = threads ? share(left, threads) : kBlock;
        }
        const int64_t last = std::min(s->stop, first + room);
        pieces_.push_back({first, last, s->of});
        room -= last - first;
        left -= last - first;
        first = last;
      }
    }
    begins_.push_back(pieces_.size());
  }

  int64_t count() const { return begins_.size() - 1; }
  const Stretch* begin(int64_t block) const { return pieces_.data() + begins_[block]; }
  const Stretch* end(int64_t block) const { return pieces_.data() + begins_[block + 1]; }

 private:
  static int64_t share(int64_t left, int threads) {
    const int64_t half = left / (2 * threads) / kSmallestBlock * kSmallestBlock;
    return std::max(kSmallestBlock, std::min(kLargestBlock, half));
  }

  std::vector<Stretch> pieces_;
  std::vector<size_t> begins_;
};

}  // namespace gptpar
