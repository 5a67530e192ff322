// SPDX-License-Identifier: Apache-2.0
// From a call to a row of the plan. Knows nothing of what is compiled, nor of CUDA.
#pragma once

#include <cstdint>
#include <span>

#include "attnres/attnres.h"
#include "plan_table.hpp"

namespace attnres {

// The measured or derived table of an architecture family, for calls with one prefix per bank entry or several.
std::span<const PlanRow> builtin_plan(int compute_major, bool shares_entries);

// That of merges on every GPU: they have one bank row and take no table of a plan file.
std::span<const PlanRow> builtin_merge_plan();

// The row of `table` that serves checked arguments with num_tokens > 0 on `num_sms` multiprocessors, with
// the call's overrides. Throws Error(ATTNRES_UNSUPPORTED) for overrides that contradict each other.
//
// A batch-invariant call takes no row of the table: its kernel, NC and cluster size, on which a token's bits
// depend, must not follow from the batch. Residency and depth, on which they do not, may.
PlanRow choose_row(const attnres_forward_args& args, std::span<const PlanRow> table, int num_sms);

}  // namespace attnres
