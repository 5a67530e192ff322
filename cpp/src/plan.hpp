// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

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

struct Gpu {
  int compute_major;
  int compute_minor;
  int num_sms;
  const char* name;  // null for one that is only described
};

// The launch for checked arguments with num_tokens > 0. Throws Error(ATTNRES_UNSUPPORTED) naming what no
// compiled permutation serves, and Error(ATTNRES_INVALID_ARGUMENT) when LIBATTNRES_PLAN_FILE is wrong.
Plan make_plan(const attnres_forward_args& args, const Gpu& gpu);

// Where the plan of a GPU comes from, "built-in" or a file and line; and what is wrong with
// LIBATTNRES_PLAN_FILE, or empty. Neither throws.
std::string plan_source(const Gpu& gpu);
std::string plan_error();

}  // namespace attnres
