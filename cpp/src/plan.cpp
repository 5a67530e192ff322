// SPDX-License-Identifier: Apache-2.0
#include "plan.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "error.hpp"
#include "plan_choice.hpp"
#include "plan_file.hpp"

namespace attnres {
namespace {

// Shared memory of an SM and of a block, CUDA C++ Programming Guide, "Compute Capabilities": the same for
// 9.0, 10.0 and 10.3.
constexpr int64_t kSharedMemoryPerSm = 233472;
constexpr int64_t kReservedPerBlock = 1024;
constexpr int64_t kMaxPerBlock = kSharedMemoryPerSm - kReservedPerBlock;

std::string describe(const attnres_permutation& p) {
  std::string text = p.kernel == ATTNRES_KERNEL_RING ? "ring kernel" : "cluster kernel";
  text += " with hidden_size " + std::to_string(p.hidden_size) + ", " +
          std::to_string(p.num_sources) + " sources, " + std::to_string(p.prefixes_per_row) +
          " prefixes per bank row";
  text += p.kernel == ATTNRES_KERNEL_RING ? ", rows_per_stage " + std::to_string(p.rows_per_stage)
                                          : ", cluster_size " + std::to_string(p.cluster_size);
  return text;
}

void refuse(const attnres_permutation& wanted) {
  bool same_hidden_size = false;
  std::string sizes;
  for (const Instance& instance : instances()) {
    const int32_t size = instance.permutation.hidden_size;
    same_hidden_size |= size == wanted.hidden_size;
    const std::string text = std::to_string(size);
    if (sizes.find(text) == std::string::npos) sizes += (sizes.empty() ? "" : ", ") + text;
  }
  if (!same_hidden_size) {
    fail(ATTNRES_UNSUPPORTED, "hidden_size: expected one that is compiled (" + sizes + "), got " +
                                  std::to_string(wanted.hidden_size));
  }
  fail(ATTNRES_UNSUPPORTED,
       "permutation: expected one that is compiled, got the " + describe(wanted));
}

int max_ctas_per_sm(int kernel, int num_sources, int rows_per_stage, int cluster_size) {
  for (const Instance& instance : instances()) {
    const attnres_permutation& p = instance.permutation;
    if (p.kernel == kernel && p.num_sources == num_sources && p.rows_per_stage == rows_per_stage &&
        p.cluster_size == cluster_size && p.prefixes_per_row == 1) {
      return kernel == ATTNRES_KERNEL_RING ? static_cast<int>(*instance.max_ctas_per_sm) : 1;
    }
  }
  return 0;
}

// The file of LIBATTNRES_PLAN_FILE, or what is wrong with it; both empty without one.
struct UserPlan {
  std::string path;
  PlanFile file;
  std::string error;
};

// Read once and kept until the process ends: a kernel may be launched from another static object's destructor.
const UserPlan& user_plan() {
  static const UserPlan& plan = *[] {
    auto* fresh = new UserPlan;
    const char* path = std::getenv(kPlanFileVariable);
    if (path == nullptr || *path == '\0') return fresh;
    fresh->path = path;
    try {
      fresh->file = read_plan_file(fresh->path, max_ctas_per_sm);
    } catch (const Error& error) {
      fresh->error = error.message;
    }
    return fresh;
  }();
  return plan;
}

const PlanSection* user_section(const Gpu& gpu) {
  const PlanFile& file = user_plan().file;
  if (file.empty()) return nullptr;
  return find_section(file, gpu.compute_major, gpu.compute_minor, gpu.num_sms, gpu.name);
}

// Row slots that a block should have at most. It holds a stage, or a prefix and its delta, before it hands a
// slot back.
int64_t ring_depth(const attnres_forward_args& args, const PlanRow& row, int ctas_per_sm) {
  const int least = std::max(2, row.rows_per_stage);
  if (args.rows_in_flight != 0 && args.rows_in_flight < least * ctas_per_sm) {
    fail(ATTNRES_UNSUPPORTED,
         "rows_in_flight: expected at least " + std::to_string(least * ctas_per_sm) +
             " with rows_per_stage " + std::to_string(row.rows_per_stage) + " and ctas_per_sm " +
             std::to_string(ctas_per_sm) + ", got " + std::to_string(args.rows_in_flight));
  }
  if (row.rows_in_flight == 0) return std::numeric_limits<int32_t>::max();
  return std::max(least, row.rows_in_flight / ctas_per_sm);
}

std::span<const PlanRow> plan_table(const attnres_forward_args& args, const Gpu& gpu) {
  if (!user_plan().error.empty()) fail(ATTNRES_INVALID_ARGUMENT, user_plan().error);
  const PlanSection* section = user_section(gpu);
  if (section != nullptr) return section->rows;
  return builtin_plan(gpu.compute_major, args.num_tokens > args.num_bank_tokens);
}

}  // namespace

std::string plan_error() { return user_plan().error; }

std::string plan_source(const Gpu& gpu) {
  const PlanSection* section = user_section(gpu);
  if (section == nullptr) return "built-in";
  return printable_path(user_plan().path) + ", line " + std::to_string(section->line);
}

uint32_t cluster_grid(int64_t entries, int cluster_size, int64_t num_tokens) {
  if (entries * cluster_size > std::numeric_limits<int32_t>::max()) {
    fail(ATTNRES_UNSUPPORTED,
         "num_tokens: expected at most " +
             std::to_string(std::numeric_limits<int32_t>::max() / cluster_size) +
             " for the cluster kernel, got " + std::to_string(num_tokens));
  }
  return static_cast<uint32_t>(entries * cluster_size);
}

RingShape shape_ring(const RingKernel& kernel, const attnres_forward_args& args, const PlanRow& row,
                     int num_sms, const std::string& description) {
  const int32_t max_ctas = static_cast<int32_t>(kernel.max_ctas_per_sm);
  if (args.ctas_per_sm > max_ctas) {
    fail(ATTNRES_UNSUPPORTED, "ctas_per_sm: expected at most " + std::to_string(max_ctas) +
                                  " for the " + description + ", got " +
                                  std::to_string(args.ctas_per_sm));
  }
  const int64_t entries = args.num_bank_tokens;
  RingShape shape{};
  shape.ctas_per_sm = std::min(row.ctas_per_sm, max_ctas);
  shape.grid_size =
      static_cast<uint32_t>(std::min<int64_t>(entries, int64_t{num_sms} * shape.ctas_per_sm));
  // As many row slots as fit, and no more than the rows a block will ever ask for: what a small batch
  // leaves free, the next kernel can use.
  const int64_t row_bytes = args.hidden_size * 2;
  const int64_t budget =
      std::min(kMaxPerBlock, kSharedMemoryPerSm / shape.ctas_per_sm - kReservedPerBlock);
  const int64_t entries_per_block = (entries + shape.grid_size - 1) / shape.grid_size;
  shape.ring_rows = static_cast<int32_t>(std::min(
      {(budget - kernel.fixed_shared_memory) / row_bytes, kernel.rows_per_entry * entries_per_block,
       int64_t{kernel.max_ring_rows}, ring_depth(args, row, shape.ctas_per_sm)}));
  shape.shared_memory_bytes =
      static_cast<uint32_t>(kernel.fixed_shared_memory + shape.ring_rows * row_bytes);
  return shape;
}

Plan make_plan(const attnres_forward_args& args, const Gpu& gpu) {
  const int num_sms = gpu.num_sms;
  const int64_t entries = args.num_bank_tokens;
  const int64_t prefixes = args.num_tokens / entries;
  if (args.num_tokens > std::numeric_limits<int32_t>::max()) {
    fail(ATTNRES_UNSUPPORTED, "num_tokens: expected at most 2147483647 on a device, got " +
                                  std::to_string(args.num_tokens));
  }
  const int prefixes_per_row = static_cast<int>(std::min<int64_t>(prefixes, 31));
  const PlanRow row = choose_row(args, plan_table(args, gpu), num_sms);
  const bool ring = row.kernel == ATTNRES_KERNEL_RING;
  const bool has_output_norm = args.output_norm_weight != nullptr;
  const attnres_permutation wanted = {
      .struct_size = sizeof(attnres_permutation),
      .kernel = row.kernel,
      .hidden_size = static_cast<int32_t>(std::min<int64_t>(args.hidden_size, 1 << 30)),
      .num_sources = args.num_blocks + 1,
      .rows_per_stage = ring ? row.rows_per_stage : 0,
      .prefixes_per_row = prefixes_per_row,
      .cluster_size = ring ? 0 : row.cluster_size,
      .has_output_norm = has_output_norm,
      .static_common_path = has_output_norm && args.delta != nullptr && args.block_write_idx < 0};
  const Instance* instance = find_instance(wanted);
  if (instance == nullptr) refuse(wanted);

  if (!ring) {
    return {.instance = instance,
            .grid_size = cluster_grid(entries, row.cluster_size, args.num_tokens),
            .shared_memory_bytes = 0,
            .ctas_per_sm = 0,
            .ring_rows = 0};
  }
  const RingKernel kernel = {
      .max_ctas_per_sm = *instance->max_ctas_per_sm,
      .max_ring_rows = *instance->max_ring_rows,
      .fixed_shared_memory = *instance->fixed_shared_memory,
      .rows_per_entry = args.num_blocks + (args.delta != nullptr ? 2 : 1) * prefixes};
  const RingShape shape = shape_ring(kernel, args, row, num_sms, describe(wanted));
  return {.instance = instance,
          .grid_size = shape.grid_size,
          .shared_memory_bytes = shape.shared_memory_bytes,
          .ctas_per_sm = shape.ctas_per_sm,
          .ring_rows = shape.ring_rows};
}

}  // namespace attnres
