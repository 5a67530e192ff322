// SPDX-License-Identifier: Apache-2.0
// All inline PTX of the project, one function per instruction. Sections are those of the PTX ISA 9.0
// manual; "sm_90" is the first target that has the instruction. An asm statement that touches memory
// carries a memory clobber, so that the compiler keeps its place among loads and stores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace attnres::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 9.7.13.15.9 mbarrier.init. sm_80. Clobbers memory: the barrier word.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// 9.7.13.4 fence.mbarrier_init: initialised barriers become visible to the async proxy and the cluster.
// sm_90.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// 9.7.13.15.13 mbarrier.arrive (release, cta scope). sm_80.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// 9.7.13.15.13 mbarrier.arrive.expect_tx: one arrival that also announces `bytes` of asynchronous
// writes. sm_90.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// 9.7.13.15.16 mbarrier.try_wait.parity (acquire, cta scope), repeated until the phase of `parity` is
// over. The caller may be at most one phase behind. sm_90.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "RETRY_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra RETRY_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same with acquire at cluster scope, for barriers that peers complete. sm_90.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "RETRY_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra RETRY_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// 9.7.9.25.4.1 cp.async.bulk, global to shared, completing on an mbarrier. Addresses and `bytes` are
// multiples of 16. sm_90.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// 9.7.13.4 fence.proxy.async: this thread's accesses to shared memory come before what the async proxy (a
// bulk copy) does there after a barrier that follows. Without it a slot can be overwritten while a load
// from it is still on its way. sm_90.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// 9.7.13.13 griddepcontrol.wait: earlier grids have finished and their writes are visible. No-op in a
// launch without the programmatic attribute. sm_90. Clobbers memory: no load may move above it.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// 9.7.13.13 griddepcontrol.launch_dependents: this block no longer holds dependents back. sm_90.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// 9.7.13.1 bar.sync on a named barrier, for `threads` threads of the block. sm_70.
__device__ __forceinline__ void named_barrier_sync(uint32_t name, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// 9.7.13.4 barrier.cluster.arrive and .wait, all threads of the cluster. sm_90.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 10. %cluster_ctarank: rank of this block in its cluster. sm_90.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// 9.7.9.23 mapa: the address in block `rank` of the cluster that corresponds to a local one. sm_90.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// 9.7.9.13 st.async: store to a peer's shared memory that counts as 4 bytes on the peer's mbarrier.
// sm_90.
__device__ __forceinline__ void store_async(uint32_t address, float value, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
}

// 9.7.9.8 ld.global.nc: 16 bytes that no one writes while the grid runs (weights). sm_70.
__device__ __forceinline__ uint4 load_read_only(const void* pointer) {
  uint4 value;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(pointer));
  return value;
}

// 9.7.9.8 ld.global: 16 bytes of activations. Volatile with a clobber: stays below griddepcontrol.wait.
__device__ __forceinline__ uint4 load_global(const void* pointer) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(pointer)
               : "memory");
  return value;
}

// 9.7.9.8 ld.shared: 16 bytes, kept in place between the waits and arrivals that guard them.
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// 9.7.9.12 st.shared.
__device__ __forceinline__ void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float4 value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// 9.7.9.12 st.global: 16 bytes.
__device__ __forceinline__ void store_global(void* pointer, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// 9.7.3.21 ex2.approx.ftz: 2^x; results below 2^-126 become 0. sm_20.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace attnres::ptx
