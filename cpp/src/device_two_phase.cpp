// SPDX-License-Identifier: Apache-2.0
// The two phases on a device: which kernel and launch a call takes, and the launch.
#include <algorithm>
#include <limits>
#include <string>

#include "device.hpp"
#include "device_forward.hpp"
#include "error.hpp"
#include "plan.hpp"
#include "plan_choice.hpp"
#include "two_phase_registry.hpp"

namespace attnres {
namespace {

constexpr int64_t kMaxBankTokens = int64_t{1} << 30;  // groups and rounds are counted in 32 bits

template <typename Params>
void launch(void (*function)(Params), Params& params, const cudaLaunchConfig_t& config) {
  void* arguments[] = {&params};
  require_success(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(function), arguments),
                  "cudaLaunchKernelExC");
}

cudaLaunchAttribute programmatic_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

[[noreturn]] void refuse_hidden_size(int64_t hidden_size) {
  std::string sizes;
  for (const BankEntry& entry : bank_kernels()) {
    const std::string size = std::to_string(entry.hidden_size);
    if (sizes.find(size) == std::string::npos) sizes += (sizes.empty() ? "" : ", ") + size;
  }
  fail(ATTNRES_UNSUPPORTED, "hidden_size: expected one that is compiled (" + sizes + "), got " +
                                std::to_string(hidden_size));
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

BankParams bank_params(const attnres_bank_args& args) {
  if (args.num_bank_tokens > kMaxBankTokens) {
    fail(ATTNRES_UNSUPPORTED, "num_bank_tokens: expected at most " +
                                  std::to_string(kMaxBankTokens) + " on a device, got " +
                                  std::to_string(args.num_bank_tokens));
  }
  return {.blocks = args.blocks,
          .norm_weights = args.norm_weights,
          .qk_weights = args.qk_weights,
          .bank = args.bank,
          .lse = args.lse,
          .blocks_token_stride = args.blocks_token_stride,
          .blocks_row_stride = args.blocks_row_stride,
          .norm_weights_stride = args.norm_weights_stride,
          .qk_weights_stride = args.qk_weights_stride,
          .bank_site_stride = args.bank_site_stride,
          .bank_token_stride = args.bank_token_stride,
          .lse_stride = args.lse_stride,
          .eps = args.eps,
          .num_tokens = static_cast<int32_t>(args.num_bank_tokens),
          .num_blocks = args.num_blocks,
          .num_sites = args.num_sites,
          .parts = 1,
          .sites_per_part = args.num_sites,
          .entries_per_group = kBankEntriesPerGroup};
}

// H200 (132 SMs, of which 15 clusters of 8 have 120), 2026-11-29, S = 24, microseconds, before the first groups were
// read beside the queries: one token took 4.5 with eight sites a cluster and 5.7 with all of them, 4 tokens 5.5 and
// 7.1, 16 tokens 10.4 and 8.7.
constexpr int64_t kMaxTokensToSplitSites = 8;
constexpr int32_t kSitesOfASplit = 8;

// How many clusters share the entries; sets how the sites are shared.
int64_t choose_bank_launch(const attnres_bank_args& args, int resident_clusters,
                           BankParams& params) {
  const int64_t tokens = args.num_bank_tokens;
  const int32_t most = tokens <= kMaxTokensToSplitSites ? kSitesOfASplit : kBankSitesPerPart;
  params.parts = static_cast<int32_t>(ceil_div(args.num_sites, most));
  params.sites_per_part = static_cast<int32_t>(ceil_div(args.num_sites, params.parts));
  params.entries_per_group = static_cast<int32_t>(std::min<int64_t>(tokens, kBankEntriesPerGroup));
  if (args.num_clusters > 0) return std::min<int64_t>(args.num_clusters, tokens);
  return std::clamp<int64_t>(resident_clusters / params.parts, 1,
                             ceil_div(tokens, params.entries_per_group));
}

struct MergePlan {
  const MergeEntry* entry;
  MergeKernel kernel;
  RingShape ring;  // of the ring kernel
  int64_t grid_size;
};

std::string describe(const MergeEntry& wanted) {
  return std::string(wanted.kernel == ATTNRES_KERNEL_RING ? "ring kernel" : "cluster kernel") +
         " of a merge with hidden_size " + std::to_string(wanted.hidden_size) + ", " +
         std::to_string(wanted.prefixes_per_row) + " prefixes per bank row" +
         (wanted.kernel == ATTNRES_KERNEL_RING
              ? ""
              : ", cluster_size " + std::to_string(wanted.cluster_size));
}

// The operator's call of the same shape and overrides, for the choice of a row of the plan.
attnres_forward_args as_forward(const attnres_merge_args& args) {
  attnres_forward_args forward{};
  forward.struct_size = sizeof(forward);
  forward.num_tokens = args.num_tokens;
  forward.num_bank_tokens = args.num_bank_tokens;
  forward.hidden_size = args.hidden_size;
  forward.num_blocks = 1;
  forward.pdl = args.pdl;
  forward.kernel = args.kernel;
  forward.rows_per_stage = args.rows_per_stage;
  forward.ctas_per_sm = args.ctas_per_sm;
  forward.cluster_size = args.cluster_size;
  forward.rows_in_flight = args.rows_in_flight;
  forward.batch_invariant = args.batch_invariant;
  return forward;
}

MergePlan make_merge_plan(const attnres_merge_args& args, int num_sms) {
  if (args.num_tokens > std::numeric_limits<int32_t>::max()) {
    fail(ATTNRES_UNSUPPORTED, "num_tokens: expected at most 2147483647 on a device, got " +
                                  std::to_string(args.num_tokens));
  }
  if (args.rows_per_stage > 1) {
    fail(ATTNRES_UNSUPPORTED,
         "rows_per_stage: expected 1 in a merge, which has one bank row, got " +
             std::to_string(args.rows_per_stage));
  }
  const int64_t entries = args.num_bank_tokens, prefixes = args.num_tokens / entries;
  const attnres_forward_args forward = as_forward(args);
  PlanRow row = choose_row(forward, builtin_merge_plan(), num_sms);
  row.rows_per_stage = 1;
  const bool ring = row.kernel == ATTNRES_KERNEL_RING;
  const bool has_output_norm = args.output_norm_weight != nullptr;
  const MergeEntry wanted = {
      .kernel = row.kernel,
      .hidden_size = static_cast<int32_t>(std::min<int64_t>(args.hidden_size, 1 << 30)),
      .prefixes_per_row = static_cast<int32_t>(std::min<int64_t>(prefixes, 1 << 30)),
      .cluster_size = ring ? 0 : row.cluster_size,
      .float32_bank = args.float32_bank != 0,
      .has_output_norm = has_output_norm,
      .static_common_path = has_output_norm && args.delta != nullptr && args.block_write_idx < 0,
      .get = nullptr};
  MergePlan plan{};
  plan.entry = find_merge(wanted);
  if (plan.entry == nullptr) {
    if (find_bank(args.hidden_size, wanted.float32_bank) == nullptr) {
      refuse_hidden_size(args.hidden_size);
    }
    fail(ATTNRES_UNSUPPORTED,
         "permutation: expected one that is compiled, got the " + describe(wanted));
  }
  plan.kernel = plan.entry->get();
  if (!ring) {
    plan.grid_size = cluster_grid(entries, row.cluster_size, args.num_tokens);
    return plan;
  }
  const RingKernel kernel = {
      .max_ctas_per_sm = plan.kernel.max_ctas_per_sm,
      .max_ring_rows = plan.kernel.max_ring_rows,
      .fixed_shared_memory = plan.kernel.fixed_shared_memory,
      .rows_per_entry = plan.kernel.mixed_slots + (args.delta != nullptr ? 2 : 1) * prefixes};
  plan.ring = shape_ring(kernel, forward, row, num_sms, describe(wanted));
  plan.grid_size = plan.ring.grid_size;
  return plan;
}

MergeParams merge_params(const attnres_merge_args& args, int32_t ring_rows) {
  MergeParams params{};
  params.prefix = args.prefix;
  params.delta = args.delta;
  params.blocks = args.blocks;
  params.norm_weight = args.norm_weight;
  params.qk_weight = args.qk_weight;
  params.output_norm_weight = args.output_norm_weight;
  params.output = args.output;
  params.num_tokens = args.num_tokens;
  params.prefix_stride = args.prefix_stride;
  params.delta_stride = args.delta_stride;
  params.blocks_token_stride = args.blocks_token_stride;
  params.blocks_row_stride = args.blocks_row_stride;
  params.output_stride = args.output_stride;
  params.eps = args.eps;
  params.output_norm_eps = args.output_norm_eps;
  params.block_write_idx = args.block_write_idx;
  params.early = args.pdl == ATTNRES_PDL_EARLY;
  params.ring_rows = ring_rows;
  params.bank = args.bank;
  params.lse = args.lse;
  params.bank_stride = args.bank_stride;
  return params;
}

}  // namespace

void device_bank(const attnres_bank_args& args, CUstream_st* stream) {
  const CurrentDevice current(args.device);
  require_native(current.ordinal());
  const BankEntry* entry = find_bank(args.hidden_size, args.float32_bank != 0);
  if (entry == nullptr) refuse_hidden_size(args.hidden_size);
  const BankKernel kernel = entry->get();
  BankParams params = bank_params(args);
  const int64_t clusters =
      choose_bank_launch(args, prepare_bank(*entry, current.ordinal()), params);
  cudaLaunchAttribute attributes[] = {programmatic_launch()};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(clusters * params.parts * kBankClusterSize));
  config.blockDim = dim3(kernel.block_size);
  config.dynamicSmemBytes = kernel.shared_memory;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = args.pdl != ATTNRES_PDL_OFF ? 1 : 0;
  launch(kernel.function, params, config);
}

void device_bank_floor(const attnres_bank_args& args, CUstream_st* stream) {
  const CurrentDevice current(args.device);
  require_native(current.ordinal());
  const BankFloorEntry* entry = find_bank_floor(args.hidden_size, args.float32_bank != 0);
  if (entry == nullptr) refuse_hidden_size(args.hidden_size);
  require_success(entry->launch(bank_params(args), args.pdl != ATTNRES_PDL_OFF, stream),
                  "cudaLaunchKernelExC");
}

void device_merge(const attnres_merge_args& args, CUstream_st* stream) {
  const CurrentDevice current(args.device);
  const attnres_probe_info& info = require_native(current.ordinal());
  const MergePlan plan = make_merge_plan(args, info.num_sms);
  prepare(*plan.entry, current.ordinal());
  MergeParams params = merge_params(args, plan.ring.ring_rows);
  cudaLaunchAttribute attributes[2]{};
  uint32_t count = 0;
  if (plan.entry->cluster_size > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<uint32_t>(plan.entry->cluster_size), 1, 1};
  }
  if (args.pdl != ATTNRES_PDL_OFF) attributes[count++] = programmatic_launch();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(plan.grid_size));
  config.blockDim = dim3(plan.kernel.block_size);
  config.dynamicSmemBytes = plan.ring.shared_memory_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  launch(plan.kernel.function, params, config);
}

}  // namespace attnres
