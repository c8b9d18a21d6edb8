// Divides vectors into blocks. Each thread takes one block at a time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" {

// Elements [start, stop) of the vectors of steps[of]. gptpar.optim.cpu_adam packs the same struct.
struct GptparGroupRange {
  int64_t start, stop, of;
};

}  // extern "C"

namespace gptpar {

using GroupRange = GptparGroupRange;

// Elements of a block: kBlock if all blocks are equal, else between the two others.
constexpr int64_t kBlock = 1 << 16, kLargestBlock = 1 << 18, kSmallestBlock = 1 << 14;

// Blocks of a list of ranges, which may be one long vector or thousands of short rows: a block may be a part of a range
// or many ranges.
class Blocks {
 public:
  // threads: number of threads that share the work. A block is a fraction of the remaining elements (guided
  // self-scheduling: Polychronopoulos and Kuck 1987): large blocks cost less overhead, and small blocks at the end let
  // the threads finish together. 0: all blocks but the last have kBlock elements, so they do not depend on the threads.
  Blocks(const GroupRange* group_ranges, int64_t count, int threads) {
    int64_t left = 0, room = 0;
    for (const GroupRange* s = group_ranges; s < group_ranges + count; ++s) left += s->stop - s->start;
    for (const GroupRange* s = group_ranges; s < group_ranges + count; ++s) {
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
  const GroupRange* begin(int64_t block) const { return pieces_.data() + begins_[block]; }
  const GroupRange* end(int64_t block) const { return pieces_.data() + begins_[block + 1]; }

 private:
  static int64_t share(int64_t left, int threads) {
    const int64_t half = left / (2 * threads) / kSmallestBlock * kSmallestBlock;
    return std::max(kSmallestBlock, std::min(kLargestBlock, half));
  }

  std::vector<GroupRange> pieces_;
  std::vector<size_t> begins_;
};

}  // namespace gptpar
