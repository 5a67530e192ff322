// SPDX-License-Identifier: Apache-2.0
#include "plan.hpp"

#include <algorithm>
#include <limits>
#include <span>
#include <string>

#include "device_forward.hpp"
#include "error.hpp"
#include "plan_table.hpp"

namespace attnres {
namespace {

// Shared memory of an SM and of a block, CUDA C++ Programming Guide, "Compute Capabilities": the same for
// 9.0, 10.0 and 10.3.
constexpr int64_t kSharedMemoryPerSm = 233472;
constexpr int64_t kReservedPerBlock = 1024;
constexpr int64_t kMaxPerBlock = kSharedMemoryPerSm - kReservedPerBlock;

PlanRow choose_row(const attnres_forward_args& args, int64_t entries, int prefixes,
                   int compute_major, int num_sms) {
  const std::span<const PlanRow> table = compute_major >= 10
                                             ? std::span<const PlanRow>(kBlackwellPlan)
                                             : std::span<const PlanRow>(kHopperPlan);
  const double entries_per_sm = static_cast<double>(entries) / num_sms;
  const bool wants_ring = args.kernel == ATTNRES_KERNEL_RING || args.rows_per_stage != 0 ||
                          args.ctas_per_sm != 0 || prefixes > 1;
  const bool wants_cluster = args.kernel == ATTNRES_KERNEL_CLUSTER || args.cluster_size != 0;
  const Reads reads = args.pdl == ATTNRES_PDL_EARLY ? Reads::kEarly : Reads::kAfterWait;
  const auto serves = [&](const PlanRow& row) {
    return (row.reads == Reads::kAny || row.reads == reads) &&
           (row.kernel == ATTNRES_KERNEL_RING ? !wants_cluster : !wants_ring);
  };
  // A batch beyond every row of the kernel that was asked for takes that kernel's last row.
  PlanRow row = cluster_row(Reads::kAny, kUnbounded, 2);
  for (const PlanRow& candidate : table) {
    if (!serves(candidate)) continue;
    row = candidate;
    if (entries_per_sm <= candidate.max_entries_per_sm) break;
  }
  if (args.rows_per_stage != 0) row.rows_per_stage = args.rows_per_stage;
  if (args.cluster_size != 0) row.cluster_size = args.cluster_size;
  if (args.ctas_per_sm != 0) row.ctas_per_sm = args.ctas_per_sm;
  return row;
}

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

}  // namespace

Plan make_plan(const attnres_forward_args& args, int compute_major, int num_sms) {
  const int64_t entries = args.num_bank_tokens;
  const int64_t prefixes = args.num_tokens / entries;
  if (args.num_tokens > std::numeric_limits<int32_t>::max()) {
    fail(ATTNRES_UNSUPPORTED, "num_tokens: expected at most 2147483647 on a device, got " +
                                  std::to_string(args.num_tokens));
  }
  if (args.kernel == ATTNRES_KERNEL_CLUSTER &&
      (args.rows_per_stage != 0 || args.ctas_per_sm != 0)) {
    fail(ATTNRES_UNSUPPORTED,
         "kernel: expected the ring kernel with rows_per_stage or ctas_per_sm, got the cluster "
         "kernel");
  }
  if (args.cluster_size != 0 &&
      (args.kernel == ATTNRES_KERNEL_RING || args.rows_per_stage != 0 || args.ctas_per_sm != 0)) {
    fail(ATTNRES_UNSUPPORTED,
         "kernel: expected the cluster kernel with cluster_size, got the ring kernel");
  }
  const int prefixes_per_row = static_cast<int>(std::min<int64_t>(prefixes, 31));
  const PlanRow row = choose_row(args, entries, prefixes_per_row, compute_major, num_sms);
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

  Plan plan{.instance = instance,
            .grid_size = 0,
            .shared_memory_bytes = 0,
            .ctas_per_sm = 0,
            .ring_rows = 0};
  if (!ring) {
    if (entries * row.cluster_size > std::numeric_limits<int32_t>::max()) {
      fail(ATTNRES_UNSUPPORTED,
           "num_tokens: expected at most " +
               std::to_string(std::numeric_limits<int32_t>::max() / row.cluster_size) +
               " for the cluster kernel, got " + std::to_string(args.num_tokens));
    }
    plan.grid_size = static_cast<uint32_t>(entries * row.cluster_size);
    return plan;
  }
  const int32_t max_ctas = static_cast<int32_t>(*instance->max_ctas_per_sm);
  if (args.ctas_per_sm > max_ctas) {
    fail(ATTNRES_UNSUPPORTED, "ctas_per_sm: expected at most " + std::to_string(max_ctas) +
                                  " for the " + describe(wanted) + ", got " +
                                  std::to_string(args.ctas_per_sm));
  }
  plan.ctas_per_sm = std::min(row.ctas_per_sm, max_ctas);
  plan.grid_size =
      static_cast<uint32_t>(std::min<int64_t>(entries, int64_t{num_sms} * plan.ctas_per_sm));
  // As many row slots as fit, and no more than the rows a block will ever ask for: what a small batch
  // leaves free, the next kernel can use.
  const int64_t row_bytes = args.hidden_size * 2;
  const int64_t budget =
      std::min(kMaxPerBlock, kSharedMemoryPerSm / plan.ctas_per_sm - kReservedPerBlock);
  const int64_t rows_per_entry = args.num_blocks + (args.delta != nullptr ? 2 : 1) * prefixes;
  const int64_t entries_per_block = (entries + plan.grid_size - 1) / plan.grid_size;
  plan.ring_rows = static_cast<int32_t>(
      std::min({(budget - *instance->fixed_shared_memory) / row_bytes,
                rows_per_entry * entries_per_block, int64_t{*instance->max_ring_rows}}));
  plan.shared_memory_bytes =
      static_cast<uint32_t>(*instance->fixed_shared_memory + plan.ring_rows * row_bytes);
  return plan;
}

}  // namespace attnres
