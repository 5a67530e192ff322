// SPDX-License-Identifier: Apache-2.0
// Tuning of the ring kernel as data. What depends on the batch (which NC, how many blocks per SM) is the
// plan's, in cpp/src/plan_table.hpp; here is what is fixed when a permutation is compiled.
#pragma once

namespace attnres {

template <int H, int N, int NC, int B>
struct RingPolicy {
  // Seven consumer warps of 32 elements a thread: one 14,336-byte row is 4 loads of 16 bytes a thread.
  static constexpr int kConsumerWarps = 7;

  // NC = 1 leaves room for two blocks per SM (128 registers a thread), NC > 1 keeps two chunks in
  // registers instead.
  static constexpr int kMaxCtasPerSm = NC == 1 && B == 1 ? 2 : 1;

  // Row slots are worth no more than this: 16 rows of 14,336 bytes fill the 227 KB of an SM.
  static constexpr int kMaxRingRows = 16;

  // Whether the last chunk of bank rows is settled before the prefix row is awaited. It exposes one
  // exchange when rows are already there, and hides one when the prefix is still on its way.
  static constexpr bool kSettleBeforePrefix = NC != 2;

  // Whether a chunk is settled only after the next one was reduced.
  static constexpr bool kPipelinesChunks = NC == 2;

  // Whether an entry's output is finished under the next entry's first chunk.
  static constexpr bool kDefersOutput = NC > 1 && B == 1;
};

}  // namespace attnres
