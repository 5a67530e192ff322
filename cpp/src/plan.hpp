// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "attnres/attnres.h"
#include "plan_table.hpp"
#include "registry.hpp"

namespace attnres {

struct Plan {
  const Instance* instance;
  uint32_t grid_size;
  uint32_t shared_memory_bytes;
  int32_t ctas_per_sm;  // 0 for the cluster kernel
  int32_t ring_rows;    // 0 for the cluster kernel
};

struct Gpu {
  int compute_major;
  int compute_minor;
  int num_sms;
  const char* name;  // null for one that is only described
};

// The launch for checked arguments with num_tokens > 0. Throws Error(ATTNRES_UNSUPPORTED) naming what no
// compiled permutation serves, and Error(ATTNRES_INVALID_ARGUMENT) when LIBATTNRES_PLAN_FILE is wrong.
Plan make_plan(const attnres_forward_args& args, const Gpu& gpu);

// What shapes a launch of a ring kernel beside its row of the plan.
struct RingKernel {
  uint32_t max_ctas_per_sm;
  uint32_t max_ring_rows;
  uint32_t fixed_shared_memory;  // bytes beside the row slots
  int64_t rows_per_entry;        // that pass through the ring
};
struct RingShape {
  uint32_t grid_size;
  uint32_t shared_memory_bytes;
  int32_t ctas_per_sm;
  int32_t ring_rows;
};

// Throws Error(ATTNRES_UNSUPPORTED) for overrides that the kernel, `description`, does not bear.
RingShape shape_ring(const RingKernel& kernel, const attnres_forward_args& args, const PlanRow& row,
                     int num_sms, const std::string& description);

// Thread blocks of a cluster kernel. Throws Error(ATTNRES_UNSUPPORTED) for more than a grid has.
uint32_t cluster_grid(int64_t entries, int cluster_size, int64_t num_tokens);

// Where the plan of a GPU comes from, "built-in" or a file and line; and what is wrong with
// LIBATTNRES_PLAN_FILE, or empty. Neither throws.
std::string plan_source(const Gpu& gpu);
std::string plan_error();

}  // namespace attnres
