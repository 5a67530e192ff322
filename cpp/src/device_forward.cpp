// SPDX-License-Identifier: Apache-2.0
#include "device_forward.hpp"

#include "device.hpp"
#include "error.hpp"
#include "plan.hpp"

namespace attnres {
namespace {

attnres_plan_info plan_info(const Plan& plan) {
  return {.struct_size = sizeof(attnres_plan_info),
          .permutation = plan.instance->permutation,
          .ctas_per_sm = plan.ctas_per_sm,
          .grid_size = static_cast<int32_t>(plan.grid_size),
          .block_size = static_cast<int32_t>(*plan.instance->block_size),
          .shared_memory_bytes = static_cast<int32_t>(plan.shared_memory_bytes),
          .ring_rows = plan.ring_rows};
}

Gpu gpu_of(const attnres_probe_info& info) {
  return {info.compute_major, info.compute_minor, info.num_sms, info.device_name};
}

void require_tokens(const attnres_forward_args& args) {
  if (args.num_tokens == 0) {
    fail(ATTNRES_INVALID_ARGUMENT,
         "num_tokens: expected at least 1 for a plan, got 0 (nothing is launched)");
  }
}

ForwardParams params_of(const attnres_forward_args& args, int32_t ring_rows) {
  return {.prefix = args.prefix,
          .delta = args.delta,
          .blocks = args.blocks,
          .norm_weight = args.norm_weight,
          .qk_weight = args.qk_weight,
          .output_norm_weight = args.output_norm_weight,
          .output = args.output,
          .num_tokens = args.num_tokens,
          .prefix_stride = args.prefix_stride,
          .delta_stride = args.delta_stride,
          .blocks_token_stride = args.blocks_token_stride,
          .blocks_row_stride = args.blocks_row_stride,
          .output_stride = args.output_stride,
          .eps = args.eps,
          .output_norm_eps = args.output_norm_eps,
          .block_write_idx = args.block_write_idx,
          .early = args.pdl == ATTNRES_PDL_EARLY,
          .ring_rows = ring_rows};
}

}  // namespace

void device_forward(const attnres_forward_args& args, CUstream_st* stream) {
  const CurrentDevice current(args.device);
  const attnres_probe_info& info = require_native(current.ordinal());
  const Plan plan = make_plan(args, gpu_of(info));
  prepare(*plan.instance, current.ordinal());
  const ForwardParams params = params_of(args, plan.ring_rows);
  const LaunchShape shape = {.grid_size = plan.grid_size,
                             .shared_memory_bytes = plan.shared_memory_bytes,
                             .programmatic = args.pdl != ATTNRES_PDL_OFF};
  require_success(plan.instance->launch(params, shape, stream), "cudaLaunchKernelExC");
}

void device_floor(const attnres_forward_args& args, CUstream_st* stream) {
  const CurrentDevice current(args.device);
  require_native(current.ordinal());
  const FloorEntry* floor = find_floor(args.hidden_size, args.num_blocks + 1);
  if (floor == nullptr) {
    fail(ATTNRES_UNSUPPORTED,
         "hidden_size: expected one that is compiled, got " + std::to_string(args.hidden_size));
  }
  require_success(
      floor->launch(params_of(args, 0), static_cast<int>(args.num_tokens / args.num_bank_tokens),
                    args.pdl != ATTNRES_PDL_OFF, stream),
      "cudaLaunchKernelExC");
}

attnres_plan_info plan_on_device(const attnres_forward_args& args) {
  require_tokens(args);
  const CurrentDevice current(args.device);
  const attnres_probe_info& info = require_native(current.ordinal());
  return plan_info(make_plan(args, gpu_of(info)));
}

attnres_plan_info plan_for(const attnres_forward_args& args, int compute_major, int compute_minor,
                           int num_sms) {
  require_tokens(args);
  if (num_sms <= 0) {
    fail(ATTNRES_INVALID_ARGUMENT, "num_sms: expected at least 1, got " + std::to_string(num_sms));
  }
  if (target_for(compute_major, compute_minor) == nullptr) {
    fail(ATTNRES_UNSUPPORTED, "compute capability: expected one that this library was built for (" +
                                  std::string(built_targets()) + "), got " +
                                  std::to_string(compute_major) + "." +
                                  std::to_string(compute_minor));
  }
  return plan_info(make_plan(args, {compute_major, compute_minor, num_sms, nullptr}));
}

}  // namespace attnres
