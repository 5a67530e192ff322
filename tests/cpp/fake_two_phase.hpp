// SPDX-License-Identifier: Apache-2.0
// Kernels of the two phases as their own object files would define them, for the lines of two_phase.inc, which do
// nothing. Include it in the one source file of a test program.
#pragma once

#include "two_phase.hpp"

namespace attnres {

// Each a function of its own, which a test can tell from the others.
template <int KERNEL, auto... ARGUMENTS>
void idle_merge(MergeParams) {}
template <auto... ARGUMENTS>
void idle_bank(BankParams) {}

template <int H, int B, bool FLOAT_BANK, bool NORM, bool STATIC>
MergeKernel MergeRingInstance<H, B, FLOAT_BANK, NORM, STATIC>::kernel() {
  return {.function = &idle_merge<0, H, B, FLOAT_BANK, NORM, STATIC>,
          .block_size = 256,
          .max_ctas_per_sm = B == 1 ? 2 : 1,
          .max_ring_rows = B == 1 ? 8 : 16,
          .fixed_shared_memory = 2048,
          .mixed_slots = FLOAT_BANK ? 2 : 1};
}
template <int H, int CLUSTER, bool FLOAT_BANK, bool NORM, bool STATIC>
MergeKernel MergeClusterInstance<H, CLUSTER, FLOAT_BANK, NORM, STATIC>::kernel() {
  return {.function = &idle_merge<1, H, CLUSTER, FLOAT_BANK, NORM, STATIC>,
          .block_size = H / CLUSTER / 8,
          .max_ctas_per_sm = 0,
          .max_ring_rows = 0,
          .fixed_shared_memory = 0,
          .mixed_slots = 0};
}
template <int H, bool FLOAT_BANK>
BankKernel BankInstance<H, FLOAT_BANK>::kernel() {
  return {.function = &idle_bank<H, FLOAT_BANK>, .block_size = 640, .shared_memory = 230000};
}
template <int H, bool FLOAT_BANK>
cudaError_t BankFloorInstance<H, FLOAT_BANK>::launch(const BankParams&, bool, cudaStream_t) {
  return cudaErrorNotSupported;
}

#define ATTNRES_MERGE_RING(...) template struct MergeRingInstance<__VA_ARGS__>;
#define ATTNRES_MERGE_CLUSTER(...) template struct MergeClusterInstance<__VA_ARGS__>;
#define ATTNRES_BANK(...) template struct BankInstance<__VA_ARGS__>;
#define ATTNRES_BANK_FLOOR(...) template struct BankFloorInstance<__VA_ARGS__>;
#include "two_phase.inc"
#undef ATTNRES_MERGE_RING
#undef ATTNRES_MERGE_CLUSTER
#undef ATTNRES_BANK
#undef ATTNRES_BANK_FLOOR

}  // namespace attnres
