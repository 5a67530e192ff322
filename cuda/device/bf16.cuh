// SPDX-License-Identifier: Apache-2.0
// Pairs of bfloat16 in 32-bit words, and arithmetic on pairs of float32.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace attnres {

// The two bfloat16 of a word as float32; exact.
__device__ __forceinline__ float2 unpack(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// The same by byte permutation. The compiler does not see that both are equal: it unpacks a row anew where
// the row is used again, instead of carrying the unpacked row, twice the registers, from use to use.
__device__ __forceinline__ float2 unpack_anew(uint32_t word) {
  return make_float2(__uint_as_float(__byte_perm(word, 0, 0x1044)),
                     __uint_as_float(__byte_perm(word, 0, 0x3244)));
}

// Two float32 rounded to nearest even and packed.
__device__ __forceinline__ uint32_t pack(float2 value) {
  const __nv_bfloat162 rounded = __float22bfloat162_rn(value);
  return *reinterpret_cast<const uint32_t*>(&rounded);
}

// Element-wise sum of two words, one rounding each: the exact sum of two bfloat16 is either a float32 or
// far from a tie, so this equals rounding the float32 sum.
__device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
  const __nv_bfloat162 sum = __hadd2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

__device__ __forceinline__ uint32_t& word(uint4& vector, int index) {
  return reinterpret_cast<uint32_t*>(&vector)[index];
}
__device__ __forceinline__ uint32_t word(const uint4& vector, int index) {
  return reinterpret_cast<const uint32_t*>(&vector)[index];
}

// a * b + c on both halves: one packed instruction on sm_100 and later, two before; the same bits.
__device__ __forceinline__ float2 fma2(float2 a, float2 b, float2 c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return __ffma2_rn(a, b, c);
#else
  return make_float2(__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y));
#endif
}

__device__ __forceinline__ float2 mul2(float2 a, float2 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return __fmul2_rn(a, b);
#else
  return make_float2(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y));
#endif
}

}  // namespace attnres
