// SPDX-License-Identifier: Apache-2.0
// What the host side knows of the kernels of the two phases, as instances.hpp of those of the operator.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "instances.hpp"

namespace attnres {

inline constexpr int kBankClusterSize = 8;
inline constexpr int kBankSitesPerPart = 24;    // most sites of a cluster of the bank kernel
inline constexpr int kBankEntriesPerGroup = 2;  // most entries that it works on at a time

// Shapes and meanings as in attnres_bank_args; strides in elements.
struct BankParams {
  const void* blocks;
  const void* norm_weights;
  const void* qk_weights;
  void* bank;
  float* lse;
  int64_t blocks_token_stride;
  int64_t blocks_row_stride;
  int64_t norm_weights_stride;
  int64_t qk_weights_stride;
  int64_t bank_site_stride;
  int64_t bank_token_stride;
  int64_t lse_stride;
  float eps;
  int32_t num_tokens;
  int32_t num_blocks;
  int32_t num_sites;
  // The grid is some number of clusters, times `parts`: each takes some of the entries, and of the sites.
  int32_t parts;
  int32_t sites_per_part;
  int32_t entries_per_group;
};

struct BankKernel {
  void (*function)(BankParams);
  uint32_t block_size;
  uint32_t shared_memory;
};

// The bank kernel; see bank_pass.cuh.
template <int H, bool FLOAT_BANK>
struct BankInstance {
  static BankKernel kernel();
};

// The kernel that moves the bytes of the bank kernel and no more; see bank_floor.cuh.
template <int H, bool FLOAT_BANK>
struct BankFloorInstance {
  static cudaError_t launch(const BankParams& params, bool programmatic, cudaStream_t stream);
};

// Shapes and meanings as in attnres_merge_args, which have no bank rows to read; strides in elements.
struct MergeParams : ForwardParams {
  const void* bank;
  const float* lse;
  int64_t bank_stride;
};

struct MergeKernel {
  void (*function)(MergeParams);
  uint32_t block_size;
  // Of the ring kernel.
  uint32_t max_ctas_per_sm;
  uint32_t max_ring_rows;
  uint32_t fixed_shared_memory;  // bytes beside the row slots
  uint32_t mixed_slots;          // that a bank row takes
};

// The persistent ring kernel; see merge_ring.cuh.
template <int H, int B, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
struct MergeRingInstance {
  static MergeKernel kernel();
};

// One token per thread-block cluster; see merge_cluster.cuh.
template <int H, int CLUSTER, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
struct MergeClusterInstance {
  static MergeKernel kernel();
};

}  // namespace attnres
