// SPDX-License-Identifier: Apache-2.0
// A user's own plan: the text file that LIBATTNRES_PLAN_FILE names, as `libattnres tune` writes it.
//
//   libattnres-plan 1
//   # A comment, on a line of its own.
//   device compute_capability=9.0 num_sms=132 name=NVIDIA H200
//   row reads=after_wait max_sources=9 max_entries=24 kernel=cluster cluster_size=4
//   row reads=any max_sources=9 max_entries=unlimited kernel=ring rows_per_stage=2 ctas_per_sm=2
//
// Rows belong to the device above them and are tried in order. `name` is optional and takes the rest of its
// line. The last row of a device serves every call. Nothing else is allowed, and nothing is executed.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "plan_table.hpp"

namespace attnres {

inline constexpr const char* kPlanFileVariable = "LIBATTNRES_PLAN_FILE";

// Thread blocks per SM that a compiled kernel can have for one prefix per bank row; 0 when it is not compiled.
using MaxCtasPerSm =
    std::function<int(int kernel, int num_sources, int rows_per_stage, int cluster_size)>;

struct PlanSection {
  int compute_major;
  int compute_minor;
  int num_sms;
  std::string device_name;  // empty: any
  int line;
  std::vector<PlanRow> rows;
};

using PlanFile = std::vector<PlanSection>;

// Both throw Error(ATTNRES_INVALID_ARGUMENT) that names the file and, where there is one, the line.
PlanFile parse_plan_file(const std::string& path, std::string_view text,
                         const MaxCtasPerSm& max_ctas_per_sm);
PlanFile read_plan_file(const std::string& path, const MaxCtasPerSm& max_ctas_per_sm);

// The section for a GPU, or null. One with the GPU's name comes before one without a name; a null `device_name`
// takes any.
const PlanSection* find_section(const PlanFile& file, int compute_major, int compute_minor,
                                int num_sms, const char* device_name);

// A path for a message: printable, and short enough to leave room for what is wrong with it.
std::string printable_path(std::string_view path);

}  // namespace attnres
