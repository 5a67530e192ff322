// SPDX-License-Identifier: Apache-2.0
// The scalar side of the operator, shared by the kernels: scores, and how the prefix joins the weighted sum
// `mixed` of the bank rows.
#pragma once

#include "device/ptx.cuh"

namespace attnres {

inline constexpr float kLog2E = 1.4426950408889634f;

// Score of a row of H elements in powers of two, from its sum of squares and its dot with the query.
template <int H>
__device__ __forceinline__ float score(float square_sum, float dot, float eps) {
  return dot * rsqrtf(square_sum * (1.0f / H) + eps) * kLog2E;
}

// The output before its norm is (mixed * shares.mixed + p * shares.prefix) / total.
struct Shares {
  float mixed = 0.0f;
  float prefix = 1.0f;
  float total = 1.0f;
};

// Joins p to a softmax whose weights are relative to `max` and add up to `sum`.
__device__ __forceinline__ Shares join_prefix(float max, float sum, float prefix_score) {
  const float new_max = fmaxf(max, prefix_score);
  Shares shares;
  shares.mixed = ptx::exp2_approx(max - new_max);
  shares.prefix = ptx::exp2_approx(prefix_score - new_max);
  shares.total = sum * shares.mixed + shares.prefix;
  return shares;
}

// |mixed shares.mixed + p shares.prefix|^2 from mixed.mixed, p.mixed and p.p.
struct ExpandedSquare {
  float value;
  bool cancels;  // too much of the terms is gone for the value to be exact enough
};

__device__ __forceinline__ ExpandedSquare expand_square(const Shares& shares, float mixed_mixed,
                                                        float prefix_mixed, float prefix_prefix) {
  constexpr float kCancellation = 1.0f / 128.0f;
  const float terms =
      shares.mixed * shares.mixed * mixed_mixed + shares.prefix * shares.prefix * prefix_prefix;
  const float value = 2.0f * shares.mixed * shares.prefix * prefix_mixed + terms;
  return {value, value < terms * kCancellation};
}

// Turns the shares into the factors of `mixed` and p in the output, for an output norm over H elements.
template <int H>
__device__ __forceinline__ void normalise(Shares& shares, float square, float output_norm_eps) {
  const float scale = rsqrtf(square * (1.0f / H) + output_norm_eps * (shares.total * shares.total));
  shares.mixed *= scale;
  shares.prefix *= scale;
}

// The same without an output norm.
__device__ __forceinline__ void average(Shares& shares) {
  const float scale = 1.0f / shares.total;
  shares.mixed *= scale;
  shares.prefix *= scale;
}

}  // namespace attnres
