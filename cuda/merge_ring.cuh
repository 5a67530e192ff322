// SPDX-License-Identifier: Apache-2.0
// Merge kernel for throughput: one call from what the bank kernel left for its site (arXiv 2603.15031).
//
// Contract. For each bank entry t < T and each of its B prefixes m = t B + b:
//
//   p      = prefix[m] + delta[m], one rounding; prefix[m] <- p with a delta; blocks[t, write] <- p
//   score  = dot(p, norm_weight qk_weight) rsqrt(mean(p^2) + eps)
//   output = (exp(lse[t]) bank[t] + exp(score) p) / (exp(lse[t]) + exp(score)), times
//            rsqrt(mean(.^2) + output_norm_eps) output_norm_weight
//
// Bytes moved: a bank row once per entry, and per prefix one row each of prefix, delta, output and the updated
// prefix (and the written bank row).
//
// It is the ring kernel with `mixed` given: the rows of an entry are its bank row, in two slots where that is
// float32, and the prefixes and deltas; one exchange per entry is left, that of p.p, p.q, p.mixed and
// mixed.mixed. With early reads the bank row is on its way before griddepcontrol.wait.
#pragma once

#include "forward_ring.cuh"
#include "two_phase.hpp"

namespace attnres {

template <int H, int B, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
struct MergeRingTraits : RingTraits<H, 2, 1, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH> {
  using Params = MergeParams;
  static constexpr bool kPremixed = true, kPacksMixed = !FLOAT_BANK;
  static constexpr int kMixedElementBytes = FLOAT_BANK ? 4 : 2;
  static constexpr int kMixedSlots = FLOAT_BANK ? 2 : 1;
  static_assert(RingTraits<H, 2, 1, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kVectors % 2 == 0,
                "A float32 row must divide into two slots of whole vectors.");
};

template <int H, int B, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
__global__ void __launch_bounds__(
    (MergeRingTraits<H, B, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize),
    (RingPolicy<H, 2, 1, B>::kMaxCtasPerSm))
    merge_ring_kernel(const __grid_constant__ MergeParams params) {
  using T = MergeRingTraits<H, B, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>;
  extern __shared__ __align__(128) unsigned char memory[];
  const RingAddresses<T> shared(memory);
  initialise_barriers<T>(shared, params.ring_rows);
  if (threadIdx.x >= T::kConsumers) {
    if (threadIdx.x == T::kConsumers) produce_rows<T>(params, shared);
  } else {
    RingConsumer<T>(params, shared).run();
  }
}

template <int H, int B, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
MergeKernel MergeRingInstance<H, B, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kernel() {
  using T = MergeRingTraits<H, B, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>;
  return {.function = &merge_ring_kernel<H, B, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>,
          .block_size = T::kBlockSize,
          .max_ctas_per_sm = T::Policy::kMaxCtasPerSm,
          .max_ring_rows = T::Policy::kMaxRingRows,
          .fixed_shared_memory = sizeof(RingSharedStorage<T>),
          .mixed_slots = T::kMixedSlots};
}

}  // namespace attnres
