// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attnres/attnres.h"
#include "registry.hpp"

namespace attnres {

struct Plan {
  const Instance* instance;
  uint32_t grid_size;
  uint32_t shared_memory_bytes;
  int32_t ctas_per_sm;  // 0 for the cluster kernel
  int32_t ring_rows;    // 0 for the cluster kernel
};

// The launch for checked arguments with num_tokens > 0 on a GPU of `num_sms` multiprocessors. Throws
// Error(ATTNRES_UNSUPPORTED) naming what no compiled permutation serves.
Plan make_plan(const attnres_forward_args& args, int compute_major, int num_sms);

}  // namespace attnres
