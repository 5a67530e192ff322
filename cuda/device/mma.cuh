// SPDX-License-Identifier: Apache-2.0
// Tensor-core PTX of the bank kernel; as ptx.cuh.
// Operands lie in registers as "Matrix Fragments for mma.m16n8k16" (PTX ISA 9.0, 9.7.14.5.8) says: with
// g = lane / 4 and t = lane % 4, a thread holds of A rows g and g + 8, columns 2t, 2t+1 and 2t+8, 2t+9; of B
// the same rows k of column g; of D rows g and g + 8, columns 2t, 2t+1.
#pragma once

#include "device/bf16.cuh"
#include "device/ptx.cuh"

namespace attnres::ptx {

// 9.7.14.5.15 ldmatrix: four 8 x 8 matrices of 16-bit elements; lane i gives the address of a row. sm_75.
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

// 9.7.14.5.14 mma: d += a b, products of bfloat16 exact, sums in float32. sm_80.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// 9.7.9.8 ld.shared: 4 and 8 bytes.
__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ float load_shared_float(uint32_t address) {
  return __uint_as_float(load_shared_word(address));
}
__device__ __forceinline__ float2 load_shared_float2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

// 9.7.19.5 setmaxnreg: registers of this warp from now on; all warps of a warp group alike. sm_90a.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace attnres::ptx

namespace attnres {

// value = the word returned + `rest`, as far as bfloat16 can tell.
__device__ __forceinline__ uint32_t split(float2 value, float2& rest) {
  const uint32_t high = pack(value);
  const float2 back = unpack(high);
  rest = make_float2(__fsub_rn(value.x, back.x), __fsub_rn(value.y, back.y));
  return high;
}

}  // namespace attnres
