// SPDX-License-Identifier: Apache-2.0
// Floor kernel of the bank pass: moves the bytes that it must move and does nothing that needs another thread, as
// forward_floor.cuh for the operator. It reads the bank rows of an entry, adds them up element by element, and writes
// the sum for every site, and lse. Rows are read after griddepcontrol.wait.
#pragma once

#include "device/bf16.cuh"
#include "device/ptx.cuh"
#include "two_phase.hpp"

namespace attnres {

inline constexpr int kBankFloorBlockSize = 128;

template <int H, bool FLOAT_BANK>
__global__ void __launch_bounds__(kBankFloorBlockSize)
    bank_floor_kernel(const __grid_constant__ BankParams params) {
  static_assert(H % (kBankFloorBlockSize * 8) == 0,
                "A row must divide into 16-byte vectors of blocks.");
  constexpr int kBlocksPerRow = H / (kBankFloorBlockSize * 8);
  constexpr int kMaxRows = 8;
  const int64_t entry = blockIdx.x / kBlocksPerRow;
  const int column = (blockIdx.x % kBlocksPerRow * kBankFloorBlockSize + threadIdx.x) * 8;
  const auto* rows = static_cast<const __nv_bfloat16*>(params.blocks) +
                     entry * params.blocks_token_stride + column;
  ptx::griddepcontrol_wait();
  uint4 row[kMaxRows];
#pragma unroll
  for (int i = 0; i < kMaxRows; ++i) {
    row[i] = i < params.num_blocks ? ptx::load_global(rows + i * params.blocks_row_stride)
                                   : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 1; i < kMaxRows; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) word(row[0], w) = add(word(row[0], w), word(row[i], w));
  }
  const int64_t first = entry * params.bank_token_stride + column;
  for (int site = 0; site < params.num_sites; ++site) {
    const int64_t at = first + site * params.bank_site_stride;
    if constexpr (FLOAT_BANK) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 low = unpack(word(row[0], 2 * half)),
                     high = unpack(word(row[0], 2 * half + 1));
        const float4 four = make_float4(low.x, low.y, high.x, high.y);
        ptx::store_global(static_cast<float*>(params.bank) + at + 4 * half,
                          *reinterpret_cast<const uint4*>(&four));
      }
    } else {
      ptx::store_global(static_cast<__nv_bfloat16*>(params.bank) + at, row[0]);
    }
    if (column == 0) params.lse[site * params.lse_stride + entry] = 0.0f;
  }
  ptx::griddepcontrol_launch_dependents();
}

template <int H, bool FLOAT_BANK>
cudaError_t BankFloorInstance<H, FLOAT_BANK>::launch(const BankParams& params, bool programmatic,
                                                     cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(params.num_tokens) * (H / (kBankFloorBlockSize * 8)));
  config.blockDim = dim3(kBankFloorBlockSize);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, &bank_floor_kernel<H, FLOAT_BANK>, params);
}

}  // namespace attnres
