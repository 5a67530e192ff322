// SPDX-License-Identifier: Apache-2.0
// Tuning of the ring kernel as data. What depends on the batch (which NC, how many blocks per SM) is the
// plan's, in cpp/src/plan_table.hpp; here is what is fixed when a permutation is compiled.
#pragma once

namespace attnres {

template <int H, int N, int NC, int B>
struct RingPolicy {
  // Seven consumer warps of 32 elements a thread: one 14,336-byte row is 4 loads of 16 bytes a thread.
  static constexpr int kConsumerWarps = 7;

  // Two blocks per SM hide each other's exchanges, with 128 registers a thread; three rows, or two prefix
  // rows, beside the weighted sum need more.
  static constexpr int kMaxCtasPerSm = NC <= 2 && B == 1 ? 2 : 1;

  // norm_weight * qk_weight in shared memory frees 32 registers for two row slots.
  static constexpr bool kQueryInShared = NC <= 2 || B > 1;

  // Row slots are worth no more than this.
  static constexpr int kMaxRingRows = kMaxCtasPerSm == 2 ? 8 : 16;

  // Whether an entry's output is finished under the next entry's first chunk. The prefix row that this keeps
  // in registers is one too many for two rows a stage.
  static constexpr bool kDefersOutput = B == 1 && NC != 2;
};

}  // namespace attnres
