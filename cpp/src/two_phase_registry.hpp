// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of the two phases, as registry.hpp has those of the operator.
#pragma once

#include <cstdint>
#include <span>

#include "two_phase.hpp"

namespace attnres {

// A merge kernel, and what it is for.
struct MergeEntry {
  int32_t kernel;  // ATTNRES_KERNEL_*
  int32_t hidden_size;
  int32_t prefixes_per_row;
  int32_t cluster_size;  // 0 for the ring kernel
  bool float32_bank;
  bool has_output_norm;
  bool static_common_path;
  MergeKernel (*get)();

  bool serves(const MergeEntry& wanted) const;
};

struct BankEntry {
  int32_t hidden_size;
  bool float32_bank;
  BankKernel (*get)();
};

struct BankFloorEntry {
  int32_t hidden_size;
  bool float32_bank;
  cudaError_t (*launch)(const BankParams&, bool, cudaStream_t);
};

std::span<const MergeEntry> merge_kernels();
std::span<const BankEntry> bank_kernels();

// The kernel of exactly these parameters, or null; `wanted.get` is ignored.
const MergeEntry* find_merge(const MergeEntry& wanted);
const BankEntry* find_bank(int64_t hidden_size, bool float32_bank);
const BankFloorEntry* find_bank_floor(int64_t hidden_size, bool float32_bank);

}  // namespace attnres
