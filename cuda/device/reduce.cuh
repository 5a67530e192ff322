// SPDX-License-Identifier: Apache-2.0
// Sums over a warp of several values at once.
//
// A butterfly over V values costs 5 V shuffles. Here each step halves the number of values a lane carries:
// of two values, a lane keeps the one its lane bit names and trades the other, so V values cost about
// V + 4 shuffles, and afterwards lane l holds the sum of value `transposed_index<V>(l)`.
#pragma once

#include <cstdint>

namespace attnres {

namespace detail {

template <int COUNT, int OFFSET>
__device__ __forceinline__ float transposed_sum_step(float* values, uint32_t lane) {
  constexpr int kKept = (COUNT + 1) / 2;
  const bool upper = (lane & OFFSET) != 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (i + kKept < COUNT) {
      const float keep = upper ? values[i + kKept] : values[i];
      const float trade = upper ? values[i] : values[i + kKept];
      values[i] = keep + __shfl_xor_sync(0xffffffffu, trade, OFFSET);
    } else {
      values[i] += __shfl_xor_sync(0xffffffffu, values[i], OFFSET);
    }
  }
  if constexpr (OFFSET == 1) {
    static_assert(kKept == 1, "A warp can transpose at most 32 values.");
    return values[0];
  } else {
    return transposed_sum_step<kKept, OFFSET / 2>(values, lane);
  }
}

template <int COUNT, int OFFSET>
__device__ __forceinline__ int transposed_index_step(uint32_t lane, bool& owner) {
  constexpr int kKept = (COUNT + 1) / 2;
  int index = 0;
  if constexpr (OFFSET > 1) index = transposed_index_step<kKept, OFFSET / 2>(lane, owner);
  if ((lane & OFFSET) != 0) {
    if (index + kKept < COUNT) {
      index += kKept;
    } else {
      owner = false;
    }
  }
  return index;
}

}  // namespace detail

// The warp's sum of values[transposed_index<V>(lane)]; consumes `values`.
template <int V>
__device__ __forceinline__ float transposed_sum(float (&values)[V], uint32_t lane) {
  return detail::transposed_sum_step<V, 16>(values, lane);
}

// Which value's sum a lane holds, or -1 for a lane whose sum another lane holds too.
template <int V>
__device__ __forceinline__ int transposed_index(uint32_t lane) {
  bool owner = true;
  const int index = detail::transposed_index_step<V, 16>(lane, owner);
  return owner ? index : -1;
}

}  // namespace attnres
