// SPDX-License-Identifier: Apache-2.0
// The scalar side of the operator, shared by the kernels: scores, and how the prefix joins the weighted sum
// `mixed` of the bank rows. Every product and sum is spelled out with its rounding, so that no two copies of
// this code, in one kernel or in two, can be contracted differently: a token's bits depend on it.
#pragma once

#include "device/ptx.cuh"

namespace attnres {

inline constexpr float kLog2E = 1.4426950408889634f;

// Score of a row of H elements in powers of two, from its sum of squares and its dot with the query.
template <int H>
__device__ __forceinline__ float score(float square_sum, float dot, float eps) {
  const float inverse_rms = rsqrtf(__fmaf_rn(square_sum, 1.0f / H, eps));
  return __fmul_rn(__fmul_rn(dot, inverse_rms), kLog2E);
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
  shares.total = __fmaf_rn(sum, shares.mixed, shares.prefix);
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
  const float terms = __fmaf_rn(__fmul_rn(shares.mixed, shares.mixed), mixed_mixed,
                                __fmul_rn(__fmul_rn(shares.prefix, shares.prefix), prefix_prefix));
  const float value =
      __fmaf_rn(__fmul_rn(2.0f, __fmul_rn(shares.mixed, shares.prefix)), prefix_mixed, terms);
  return {value, value < __fmul_rn(terms, kCancellation)};
}

__device__ __forceinline__ void scale_by(Shares& shares, float scale) {
  shares.mixed = __fmul_rn(shares.mixed, scale);
  shares.prefix = __fmul_rn(shares.prefix, scale);
}

// Turns the shares into the factors of `mixed` and p in the output, for an output norm over H elements.
template <int H>
__device__ __forceinline__ void normalise(Shares& shares, float square, float output_norm_eps) {
  const float epsilon = __fmul_rn(output_norm_eps, __fmul_rn(shares.total, shares.total));
  scale_by(shares, rsqrtf(__fmaf_rn(square, 1.0f / H, epsilon)));
}

// The same without an output norm.
__device__ __forceinline__ void average(Shares& shares) {
  scale_by(shares, __frcp_rn(shares.total));
}

}  // namespace attnres
