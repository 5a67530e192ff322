// SPDX-License-Identifier: Apache-2.0
// Floor kernel: moves the bytes that AttnRes forward must move and does nothing that needs another thread.
// No kernel for the operator can be much faster; benchmarks measure it beside the operator, in the same run.
//
// It reads bank rows 0..N-2, prefix and delta, adds them up element by element, and writes the updated prefix
// and the output: the bytes of forward_ring.cuh's contract, without weights, scores, softmax or norm. Rows are
// read after griddepcontrol.wait.
#pragma once

#include "device/bf16.cuh"
#include "device/ptx.cuh"
#include "instances.hpp"

namespace attnres {

inline constexpr int kFloorBlockSize = 128;

template <int H, int N>
__global__ void __launch_bounds__(kFloorBlockSize)
    floor_kernel(const __grid_constant__ ForwardParams params, int prefixes) {
  static_assert(H % (kFloorBlockSize * 8) == 0,
                "A row must divide into 16-byte vectors of blocks.");
  constexpr int kBlocksPerRow = H / (kFloorBlockSize * 8);
  const int64_t entry = blockIdx.x / kBlocksPerRow;
  const int column = (blockIdx.x % kBlocksPerRow * kFloorBlockSize + threadIdx.x) * 8;
  const auto* bank = static_cast<const __nv_bfloat16*>(params.blocks) +
                     entry * params.blocks_token_stride + column;
  ptx::griddepcontrol_wait();
  uint4 rows[N];
#pragma unroll
  for (int row = 0; row < N - 1; ++row) {
    rows[row] = ptx::load_global(bank + row * params.blocks_row_stride);
  }
  for (int b = 0; b < prefixes; ++b) {
    const int64_t token = entry * prefixes + b;
    auto* prefix =
        static_cast<__nv_bfloat16*>(params.prefix) + token * params.prefix_stride + column;
    uint4 row = ptx::load_global(prefix);
    if (params.delta != nullptr) {
      const uint4 delta = ptx::load_global(static_cast<const __nv_bfloat16*>(params.delta) +
                                           token * params.delta_stride + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) word(row, i) = add(word(row, i), word(delta, i));
      ptx::store_global(prefix, row);
    }
    if (params.block_write_idx >= 0) {
      ptx::store_global(static_cast<__nv_bfloat16*>(params.blocks) +
                            entry * params.blocks_token_stride +
                            params.block_write_idx * params.blocks_row_stride + column,
                        row);
    }
    rows[N - 1] = row;
    uint4 result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 v = unpack(word(rows[n], i));
        sum = make_float2(sum.x + v.x, sum.y + v.y);
      }
      word(result, i) = pack(sum);
    }
    ptx::store_global(
        static_cast<__nv_bfloat16*>(params.output) + token * params.output_stride + column, result);
  }
  if (params.block_write_idx < 0) ptx::griddepcontrol_launch_dependents();
}

template <int H, int N>
cudaError_t FloorInstance<H, N>::launch(const ForwardParams& params, int prefixes,
                                        bool programmatic, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<uint32_t>(params.num_tokens / prefixes * (H / (kFloorBlockSize * 8))));
  config.blockDim = dim3(kFloorBlockSize);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, &floor_kernel<H, N>, params, prefixes);
}

}  // namespace attnres
