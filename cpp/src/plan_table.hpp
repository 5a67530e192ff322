// SPDX-License-Identifier: Apache-2.0
// Which kernel runs a batch: the plan as data, one table per architecture family. The first row whose
// bounds hold is taken; an override of the call replaces single columns.
#pragma once

#include <limits>

#include "attnres/attnres.h"

namespace attnres {

struct PlanRow {
  int max_sources;             // N <= this
  double max_entries_per_sm;   // T / SMs <= this
  int kernel;
  int rows_per_stage;          // ring: NC
  int ctas_per_sm;             // ring
  int cluster_size;            // cluster
};

inline constexpr double kAny = std::numeric_limits<double>::infinity();

inline constexpr PlanRow kHopperPlan[] = {
    {9, 8.0 / 132, ATTNRES_KERNEL_CLUSTER, 0, 0, 7},
    {9, 2.0, ATTNRES_KERNEL_RING, 1, 2, 0},
    {9, kAny, ATTNRES_KERNEL_RING, 3, 1, 0},
};

// Not measured: no such GPU was at hand. The same rows as Hopper, whose SM these kernels use alike.
inline constexpr PlanRow kBlackwellPlan[] = {
    {9, 8.0 / 148, ATTNRES_KERNEL_CLUSTER, 0, 0, 7},
    {9, 2.0, ATTNRES_KERNEL_RING, 1, 2, 0},
    {9, kAny, ATTNRES_KERNEL_RING, 3, 1, 0},
};

}  // namespace attnres
