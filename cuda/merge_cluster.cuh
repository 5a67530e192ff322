// SPDX-License-Identifier: Apache-2.0
// Merge kernel for latency: the contract of merge_ring.cuh for B = 1, one token per thread-block cluster.
//
// It is the cluster kernel with `mixed` given: of its two exchanges the second is left. With early reads the bank
// row and lse are loaded before griddepcontrol.wait.
#pragma once

#include "forward_cluster.cuh"
#include "two_phase.hpp"

namespace attnres {

template <int H, int CLUSTER, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
struct MergeClusterTraits : ClusterTraits<H, 2, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH> {
  using Params = MergeParams;
  static constexpr bool kPremixed = true;
  static constexpr bool kFloatBank = FLOAT_BANK;
  static constexpr int kBankVectors = FLOAT_BANK ? 2 : 1;
};

template <int H, int CLUSTER, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
__global__ void __launch_bounds__(
    (MergeClusterTraits<H, CLUSTER, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize))
    merge_cluster_kernel(const __grid_constant__ MergeParams params) {
  using T = MergeClusterTraits<H, CLUSTER, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>;
  __shared__ ClusterSharedStorage<T> storage;
  ClusterThread<T> thread(params, storage);
  const bool early = params.early;
  thread.initialise_exchange();
  thread.load_weights();
  if (!early) ptx::griddepcontrol_wait();
  thread.load_bank();
  if (early) ptx::griddepcontrol_wait();
  thread.load_prefix();
  thread.release_dependents();
  thread.mix_bank();
  thread.take_prefix();
  thread.finish();
}

template <int H, int CLUSTER, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
MergeKernel
MergeClusterInstance<H, CLUSTER, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kernel() {
  using T = MergeClusterTraits<H, CLUSTER, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>;
  return {.function =
              &merge_cluster_kernel<H, CLUSTER, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>,
          .block_size = T::kBlockSize,
          .max_ctas_per_sm = 0,
          .max_ring_rows = 0,
          .fixed_shared_memory = 0,
          .mixed_slots = 0};
}

}  // namespace attnres
