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

  friend bool operator==(const PlanRow&, const PlanRow&) = default;
};

inline constexpr double kUnbounded = std::numeric_limits<double>::infinity();

constexpr PlanRow ring_row(Reads reads, int max_sources, double max_entries_per_sm,
                           int rows_per_stage, int ctas_per_sm) {
  return {reads, max_sources, max_entries_per_sm, ATTNRES_KERNEL_RING, rows_per_stage, ctas_per_sm,
          0};
}
constexpr PlanRow cluster_row(Reads reads, int max_sources, double max_entries_per_sm,
                              int cluster_size) {
  return {reads, max_sources, max_entries_per_sm, ATTNRES_KERNEL_CLUSTER, 0, 0, cluster_size};
}

// H200 (132 SMs), 2026-11-29, H = 7168, delta and output norm, CUDA graph, cold L2, microseconds.
// Reads after the wait, 8 blocks: T = 1: cluster of 7 2.7, of 4 2.9, of 2 3.7, ring 6.1. T = 16: of 4 3.4,
// of 7 3.7, ring 5.2. T = 64: of 2 5.9, ring 6.2. With reads before it and nothing between the calls the
// ring's start is hidden as well, 3.5 at T = 16, but in a model's step it is not: 187 calls with producers
// between take 959 with the ring and 746 with the cluster. T = 128, NC = 2 x 2 blocks and NC = 3 x 1:
// 8.2, 7.7 at 8 blocks, 5.4, 5.7 at 4. T = 1024, with the depth below: 44.6 at 8 blocks and 30.7 at 4 for
// NC = 3, 31.9 for NC = 2 at 4. At 1 block, T = 1024 and 8192: 20.9 and 154.8 for NC = 2, 21.5 and 148 for
// NC = 3; NC = 1 with two slots a block took 145 at 8192 and is still to be checked for more than one shape.
inline constexpr PlanRow kHopperPlan[] = {
    cluster_row(Reads::kAny, kMaxSources, 8.0 / 132, 7),
    cluster_row(Reads::kAny, kMaxSources, 24.0 / 132, 4),
    cluster_row(Reads::kAfterWait, kMaxSources, 64.0 / 132, 2),
    ring_row(Reads::kEarly, kMaxSources, 64.0 / 132, 3, 1),
    ring_row(Reads::kAny, 6, 4.5, 2, 2),
    ring_row(Reads::kAny, 3, 16.0, 2, 2),
    ring_row(Reads::kAny, kMaxSources, kUnbounded, 3, 1),
};

// How many rows an SM keeps in flight once blocks work through several entries. More only push one another,
// and the rows about to be written back, out of L2. H200, NC = 3, T = 8192: 1 block 148 us with 4 rows, 159
// with 6, 161 with 15; 4 blocks 222 with 6, 226 with 8. T = 1024, 8 blocks: 44.6 with 8, 45.5 with 15.
struct RingDepth {
  int max_sources;            // N <= this
  double min_entries_per_sm;  // T / SMs >= this
  int rows_per_sm;
};
inline constexpr RingDepth kHopperRingDepth[] = {{3, 16.0, 4}, {6, 4.5, 6}, {kMaxSources, 4.5, 8}};

// Derived, not measured: no such GPU was at hand. The kernels use an SM of these parts as one of Hopper's,
// so batches of as many tokens per SM take the same rows.
inline constexpr PlanRow kBlackwellPlan[] = {
    cluster_row(Reads::kAny, kMaxSources, 8.0 / 132, 7),
    cluster_row(Reads::kAny, kMaxSources, 24.0 / 132, 4),
    cluster_row(Reads::kAfterWait, kMaxSources, 64.0 / 132, 2),
    ring_row(Reads::kEarly, kMaxSources, 64.0 / 132, 3, 1),
    ring_row(Reads::kAny, kMaxSources, kUnbounded, 2, 2),
};

// Batch-invariant calls, on every GPU: the ring kernel, by the number of sources alone, as the table for
// compute capability 9.0 takes it for a few tokens per SM. What it costs has not been measured.
struct BatchInvariantRow {
  int max_sources;  // N <= this
  int rows_per_stage;
  int max_ctas_per_sm;  // from more entries than SMs on, else 1: a block by itself has more row slots
};
inline constexpr BatchInvariantRow kBatchInvariantPlan[] = {{6, 2, 2}, {kMaxSources, 3, 1}};

}  // namespace attnres
