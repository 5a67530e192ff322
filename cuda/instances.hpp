// SPDX-License-Identifier: Apache-2.0
// What the host side knows of the kernels: their parameters and one class per permutation. Plain C++:
// the registry names the classes, the generated .cu files instantiate them explicitly, and a permutation
// that is named but was not instantiated is an undefined symbol at link time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace attnres {

// The arguments of one launch, passed by value to the kernel. Shapes and meanings as in attnres.h;
// strides in elements.
struct ForwardParams {
  void* prefix;
  const void* delta;
  void* blocks;
  const void* norm_weight;
  const void* qk_weight;
  const void* output_norm_weight;
  void* output;
  int64_t num_tokens;
  int64_t prefix_stride;
  int64_t delta_stride;
  int64_t blocks_token_stride;
  int64_t blocks_row_stride;
  int64_t output_stride;
  float eps;
  float output_norm_eps;
  int32_t block_write_idx;
  int32_t early;      // bank rows may be read before griddepcontrol.wait
  int32_t ring_rows;  // ring kernel: row slots in dynamic shared memory
};

// How one launch is shaped.
struct LaunchShape {
  uint32_t grid_size;
  uint32_t shared_memory_bytes;
  bool programmatic;  // programmatic dependent launch
};

// The persistent ring kernel; see forward_ring.cuh.
template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
struct RingInstance {
  static const uint32_t kBlockSize;
  static const uint32_t kMaxCtasPerSm;
  static const uint32_t kMaxRingRows;
  static const uint32_t kFixedSharedMemory;  // bytes beside the row slots
  static cudaError_t launch(const ForwardParams& params, const LaunchShape& shape,
                            cudaStream_t stream);
  static const void* function();  // handle for cudaFuncGetAttributes and cudaFuncSetAttribute
};

// One token per thread-block cluster; see forward_cluster.cuh.
template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
struct ClusterInstance {
  static const uint32_t kBlockSize;
  static cudaError_t launch(const ForwardParams& params, const LaunchShape& shape,
                            cudaStream_t stream);
  static const void* function();
};

// The kernel that moves the same bytes and no more; see forward_floor.cuh. Any B.
template <int H, int N>
struct FloorInstance {
  static cudaError_t launch(const ForwardParams& params, int prefixes, bool programmatic,
                            cudaStream_t stream);
};

}  // namespace attnres
