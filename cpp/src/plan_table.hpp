// SPDX-License-Identifier: Apache-2.0
// Which kernel runs a batch: the plan as data, one table per architecture family. The first row whose
// bounds hold is taken; an override of the call replaces single columns.
#pragma once

#include <limits>

#include "attnres/attnres.h"

namespace attnres {

inline constexpr int kMaxSources = 9;  // eight bank rows and the prefix

// Whether bank rows are read before griddepcontrol.wait.
enum class Reads { kAny, kEarly, kAfterWait };

struct PlanRow {
  Reads reads;
  int max_sources;            // N <= this
  double max_entries_per_sm;  // T / SMs <= this
  int kernel;
  int rows_per_stage;  // ring: NC
  int ctas_per_sm;     // ring
  int cluster_size;    // cluster
  int rows_in_flight;  // ring: rows that an SM fetches ahead at most; 0: as many as fit

  friend bool operator==(const PlanRow&, const PlanRow&) = default;
};

inline constexpr double kUnbounded = std::numeric_limits<double>::infinity();

constexpr PlanRow ring_row(Reads reads, int max_sources, double max_entries_per_sm,
                           int rows_per_stage, int ctas_per_sm, int rows_in_flight = 0) {
  return {reads,       max_sources, max_entries_per_sm, ATTNRES_KERNEL_RING, rows_per_stage,
          ctas_per_sm, 0,           rows_in_flight};
}
constexpr PlanRow cluster_row(Reads reads, int max_sources, double max_entries_per_sm,
                              int cluster_size) {
  return {reads, max_sources, max_entries_per_sm, ATTNRES_KERNEL_CLUSTER, 0, 0, cluster_size, 0};
}

// H200 (132 SMs), 2026-11-29, H = 7168, delta and output norm, CUDA graph, cold L2, microseconds, over every
// kernel and depth at 1 to 8192 tokens. What the sweep taught:
// - Up to 24 tokens a cluster per token: at T = 1 and 8 blocks a cluster of 7 takes 2.6, of 4 2.9, of 2 3.6, the
//   ring 4.9. With reads before the wait and nothing between the calls the ring's start is hidden (3.5 against
//   3.1 at T = 16), but in a model's step it is not, so both ways to read take clusters. After the wait a
//   cluster of 2 stays ahead up to 64 tokens with many sources (T = 48: 5.4 against 6.1), up to 32 with few.
// - Up to one entry per SM every row of it is needed at once: with reads before the wait, T = 96 and 8 blocks
//   take 5.4 with twelve rows in flight and 6.1 with six. From 0.75 on, and after the wait, the SMs push one
//   another: T = 128 takes 7.8 with six rows, 8.4 with twelve.
// - Up to two entries, two blocks per SM finish both at once (T = 192, 8 blocks, after the wait: 11.2 against
//   11.8). At three entries one block per SM does better: two would work through two rounds of unequal length.
// - Long batches: six rows in flight, four with few sources. More only push one another, and the rows about to
//   be written back, out of L2: 8 blocks, T = 8192: 329.9 with six, 336.9 with eight, 347 with fourteen; 1 block:
//   144.9 with four in NC = 1 x 2 blocks, 146.7 in NC = 3, 159 with eight.
// - The SM's own side, a token of 8 blocks with the bank in L2, NC = 2 x 2 blocks: 3.43, of which the 17,200
//   instructions need 2.2 at one per scheduler and cycle (Nsight Compute: 63 % of the slots busy; per issue 0.9
//   cycles of waiting for rows, 0.8 for shared memory and shuffles, 0.6 at the barrier). Tried and not kept: rows
//   handed back after their use, the proxy fence left to the producer, 3.37, but with two slots a long batch of 1
//   block falls from 145 to 150; the next chunk reduced before the last is mixed, 3.32; sums of warps settled by
//   lanes, 3.28 together; the output norm's weight from L1, which leaves room for one more row, 3.40.
// - L2 hints: rows fetched as evict-first cost 9 % (8 blocks, T = 8192: 361 against 331), outputs stored as
//   streaming win nothing once the depth is right.
inline constexpr PlanRow kHopperPlan[] = {
    cluster_row(Reads::kAny, kMaxSources, 8.0 / 132, 7),
    cluster_row(Reads::kAny, kMaxSources, 24.0 / 132, 4),
    cluster_row(Reads::kAfterWait, 3, 32.0 / 132, 2),
    cluster_row(Reads::kAfterWait, 5, 48.0 / 132, 2),
    cluster_row(Reads::kAfterWait, kMaxSources, 64.0 / 132, 2),
    ring_row(Reads::kEarly, 5, 0.75, 2, 1, 6),
    ring_row(Reads::kEarly, kMaxSources, 0.75, 3, 1),
    ring_row(Reads::kAny, 5, 1.0, 2, 1, 4),
    ring_row(Reads::kAny, kMaxSources, 1.0, 3, 1, 6),
    ring_row(Reads::kAny, 2, 16.0, 2, 2, 6),
    ring_row(Reads::kAny, 6, 2.0, 2, 2, 6),
    ring_row(Reads::kEarly, kMaxSources, 2.0, 3, 1, 8),
    ring_row(Reads::kAny, kMaxSources, 2.0, 2, 2, 6),
    ring_row(Reads::kAny, 3, 3.0, 3, 1, 4),
    ring_row(Reads::kAny, kMaxSources, 3.0, 3, 1, 6),
    ring_row(Reads::kAny, 5, 4.5, 2, 2, 8),
    ring_row(Reads::kAny, 2, kUnbounded, 1, 2, 4),
    ring_row(Reads::kAny, 3, kUnbounded, 3, 1, 4),
    ring_row(Reads::kAny, 5, kUnbounded, 2, 2, 6),
    ring_row(Reads::kAny, kMaxSources, kUnbounded, 3, 1, 6),
};

// Calls whose tokens share bank entries (B > 1), same machine and day: B = 2, T = 4096: 8 blocks 223.4 with six
// rows, 225.4 with eight; 4 blocks 171.0 with four, 181.1 with six; 1 block 133.2 with four, 138.9 with six.
inline constexpr PlanRow kHopperSharedPlan[] = {
    ring_row(Reads::kAny, kMaxSources, 1.0, 3, 1),
    ring_row(Reads::kAny, 5, kUnbounded, 3, 1, 4),
    ring_row(Reads::kAny, kMaxSources, kUnbounded, 3, 1, 6),
};

// Derived, not measured: no such GPU was at hand. Small batches take the rows of 9.0, by tokens per SM. Long ones
// take the kernel that keeps an SM busiest, for these parts feed an SM faster: with the bank in L2, a token of 8
// blocks costs an SM of the H200 3.4 with NC = 2 x 2 blocks, 3.8 with NC = 3 and 3.8 with NC = 1 x 2. More rows in
// flight than there, since each SM's share of the memory's latency times bandwidth is larger.
inline constexpr PlanRow kBlackwellPlan[] = {
    cluster_row(Reads::kAny, kMaxSources, 8.0 / 132, 7),
    cluster_row(Reads::kAny, kMaxSources, 24.0 / 132, 4),
    cluster_row(Reads::kAfterWait, kMaxSources, 64.0 / 132, 2),
    ring_row(Reads::kEarly, kMaxSources, 64.0 / 132, 3, 1),
    ring_row(Reads::kAny, kMaxSources, kUnbounded, 2, 2),
};

// Merges, H200, 2026-11-29, bfloat16 bank, early reads, microseconds net of the kernel that writes the delta before
// each: a cluster per token up to 192 tokens (T = 16: 3.6 with 4 or 7 blocks; 64: 3.9 with 2, 4.5 in the ring; 128: 4.8
// against 5.1; 192: 5.8 against 6.5; 256: 7.7 against 7.1). Beyond, as for one bank row above, few rows in flight:
// T = 512: 10.7 with three for each of two blocks per SM, 11.3 with two; T = 8192, by itself: 145 with two (floor 137).
// Other GPUs take the same rows, by tokens per SM: not measured.
inline constexpr PlanRow kMergePlan[] = {
    cluster_row(Reads::kAny, kMaxSources, 8.0 / 132, 7),
    cluster_row(Reads::kAny, kMaxSources, 32.0 / 132, 4),
    cluster_row(Reads::kAny, kMaxSources, 192.0 / 132, 2),
    ring_row(Reads::kAny, kMaxSources, 16.0, 1, 2, 6),
    ring_row(Reads::kAny, kMaxSources, kUnbounded, 1, 2, 4),
};

// Batch-invariant calls, on every GPU: the ring kernel, by the number of sources alone, as the table for
// compute capability 9.0 takes it for a few tokens per SM. On the H200 a single token pays up to 1.9 times for it after
// the wait (8 blocks: 4.9 against 2.6), from 128 tokens on nothing.
struct BatchInvariantRow {
  int max_sources;  // N <= this
  int rows_per_stage;
  int max_ctas_per_sm;  // from more entries than SMs on, else 1: a block by itself has more row slots
};
inline constexpr BatchInvariantRow kBatchInvariantPlan[] = {{6, 2, 2}, {kMaxSources, 3, 1}};

}  // namespace attnres
