// SPDX-License-Identifier: Apache-2.0
// The ring kernel with its races made wide, against the library's own. tests/python/test_ring_order.py compiles
// this with copies of the kernel's headers in which the producer spoils a row slot before it fills it again, and
// consumers linger before they read a row or a partial sum. A kernel whose order holds gives the same bits all
// the same; one that reads too early, or hands back too early, reads what was spoiled. A spoiled slot takes the
// producer several microseconds, and nobody can publish the next sums without the next rows: for those who read
// sums there are runs in which one warp stays behind for longer than it takes to refill the whole ring.
#include <cstdio>
#include <cstring>

#include "device/ptx.cuh"

namespace attnres {

// Overwrites a row slot with NaN, and makes that come before the bulk copy that follows.
__device__ __forceinline__ void spoil_slot(uint32_t row, uint32_t bytes) {
  const float nan = __uint_as_float(0xffffffffu);
  for (uint32_t offset = 0; offset < bytes; offset += 16) {
    ptx::store_shared(row + offset, make_float4(nan, nan, nan, nan));
  }
  ptx::fence_proxy_async();
}

// One warp at a time stays behind, longer than the others take for a step, and the last one hardly ever does.
__device__ __forceinline__ void linger(uint32_t step) {
  if (threadIdx.x / 32 == step % 7) __nanosleep(4000);
}

// Cycles that the first warp stays behind before it reads the first of some partial sums; 0: like the others.
__device__ uint32_t sums_delay = 0;

// Before the i-th of some partial sums is read. A sleep may end early; a clock does not.
__device__ __forceinline__ void linger_at_sums(uint32_t i) {
  const uint32_t delay = sums_delay;
  if (delay == 0) return linger(i);
  if (i > 0 || threadIdx.x >= 32) return;
  const int64_t start = clock64();
  while (clock64() - start < delay) __nanosleep(1000);
  __syncwarp();
}

}  // namespace attnres

#include "forward_case.hpp"
#include "forward_ring.cuh"

using namespace forward_case;

namespace {

constexpr int kHidden = 7168;
constexpr int kBlocks = 8;  // so that each walks many tokens

void require(bool good, const char* what) {
  if (good) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(cudaGetLastError()));
  std::exit(1);
}

struct DeviceBuffers {
  void* pointers[kCount] = {};

  explicit DeviceBuffers(const ForwardCase& host) {
    for (int i = 0; i < kCount; ++i) {
      const auto& bytes = host.buffers[i].bytes;
      require(cudaMalloc(&pointers[i], bytes.size()) == cudaSuccess, "cudaMalloc");
      require(cudaMemcpy(pointers[i], bytes.data(), bytes.size(), cudaMemcpyHostToDevice) ==
                  cudaSuccess,
              "cudaMemcpy");
    }
  }
  ~DeviceBuffers() {
    for (void* pointer : pointers) cudaFree(pointer);
  }
  std::vector<unsigned char> read(const ForwardCase& host, int index) const {
    std::vector<unsigned char> bytes(host.buffers[index].bytes.size());
    require(cudaMemcpy(bytes.data(), pointers[index], bytes.size(), cudaMemcpyDeviceToHost) ==
                cudaSuccess,
            "the kernel");
    return bytes;
  }
};

// Whether the kernel of these parameters gives the library's bits with so many row slots and such a delay.
template <int N, int NC>
bool same_as_library(int ring_rows, uint32_t sums_delay) {
  using Ring = attnres::RingInstance<kHidden, N, NC, 1, true, true>;
  const ForwardCase call({.num_tokens = 6 * kBlocks, .hidden_size = kHidden, .num_blocks = N - 1});
  const DeviceBuffers wanted(call), got(call);
  attnres_forward_args args = call.args(wanted.pointers);
  args.kernel = ATTNRES_KERNEL_RING;
  args.rows_per_stage = NC;
  require(attnres_forward(&args, nullptr) == ATTNRES_OK, attnres_last_error_message());

  args = call.args(got.pointers);
  const attnres::ForwardParams params = {.prefix = args.prefix,
                                         .delta = args.delta,
                                         .blocks = args.blocks,
                                         .norm_weight = args.norm_weight,
                                         .qk_weight = args.qk_weight,
                                         .output_norm_weight = args.output_norm_weight,
                                         .output = args.output,
                                         .num_tokens = args.num_tokens,
                                         .prefix_stride = args.prefix_stride,
                                         .delta_stride = args.delta_stride,
                                         .blocks_token_stride = args.blocks_token_stride,
                                         .blocks_row_stride = args.blocks_row_stride,
                                         .output_stride = args.output_stride,
                                         .eps = args.eps,
                                         .output_norm_eps = args.output_norm_eps,
                                         .block_write_idx = -1,
                                         .early = 0,
                                         .ring_rows = ring_rows};
  require(cudaMemcpyToSymbol(attnres::sums_delay, &sums_delay, sizeof(sums_delay)) == cudaSuccess,
          "cudaMemcpyToSymbol");
  const uint32_t bytes = Ring::kFixedSharedMemory + ring_rows * kHidden * 2;
  require(cudaFuncSetAttribute(Ring::function(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               bytes) == cudaSuccess,
          "cudaFuncSetAttribute");
  require(Ring::launch(params,
                       {.grid_size = kBlocks, .shared_memory_bytes = bytes, .programmatic = false},
                       nullptr) == cudaSuccess,
          "launch");
  const bool same = wanted.read(call, kOutput) == got.read(call, kOutput) &&
                    wanted.read(call, kPrefix) == got.read(call, kPrefix);
  std::printf("N=%d NC=%d ring_rows=%d sums_delay=%u: %s\n", N, NC, ring_rows, sums_delay,
              same ? "same" : "different");
  return same;
}

}  // namespace

int main() {
  bool same = true;
  // A stage and no more; one slot beyond; more than a token needs.
  for (const uint32_t sums_delay : {0u, 2'000'000u}) {
    for (const int ring_rows : {3, 4, 11}) same &= same_as_library<9, 3>(ring_rows, sums_delay);
  }
  return same ? 0 : 1;
}

template struct attnres::RingInstance<kHidden, 9, 3, 1, true, true>;
