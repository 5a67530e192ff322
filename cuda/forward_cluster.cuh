// SPDX-License-Identifier: Apache-2.0
// Cluster kernel: AttnRes forward for latency (arXiv 2603.15031).
//
// Contract. As forward_ring.cuh, for B = 1: cluster m computes token m; each of its CLUSTER blocks owns
// H / CLUSTER columns, each thread 8 of them, and holds all N rows in registers.
//
// Bytes moved: N - 1 bank rows, prefix, delta, output and the updated prefix (and the written bank row), once.
//
// Who waits for whom. Two exchanges per token, each a round of st.async from every warp to every block
// of the cluster that completes the receiver's mbarrier by its bytes:
// - bank: v.v and v.q of the bank rows, which give their weighted sum `mixed`, while the prefix and delta
//   are on their way. With early reads the bank rows are loaded before griddepcontrol.wait; the exchange
//   stays behind it, so that dependents are released, and launch, before it.
// - prefix: p.p, p.q, p.mixed and mixed.mixed, which give the softmax over all rows and, by expanding
//   |corr mixed + w p|^2, the output norm. Where that expansion cancels, a third exchange sums the squares.
// A block sends only after barrier.cluster says that every peer's barriers are initialised, and ends only
// after it has received everything that is sent to it.
#pragma once

#include <cstddef>

#include "cluster_policy.cuh"
#include "device/bf16.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/softmax.cuh"
#include "instances.hpp"

namespace attnres {

template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
struct ClusterTraits {
  using Policy = ClusterPolicy<H, N, CLUSTER>;
  using Params = ForwardParams;
  static constexpr bool kPremixed =
      false;  // `mixed` is given, not made of bank rows: merge_cluster.cuh
  static constexpr int kHidden = H;
  static constexpr int kCluster = CLUSTER;
  static constexpr bool kHasOutputNorm = HAS_OUTPUT_NORM;
  static constexpr bool kStaticCommonPath = STATIC_COMMON_PATH;

  static constexpr int kBankRows = N - 1;
  static constexpr int kBankVectors = kBankRows > 0 ? kBankRows : 1;  // of a thread
  static constexpr int kColumns = H / CLUSTER;
  static constexpr int kBlockSize = kColumns / Policy::kElementsPerThread;
  static constexpr int kWarps = kBlockSize / 32;
  static constexpr int kSenders = CLUSTER * kWarps;
  static constexpr int kBankSums = 2 * kBankRows;
  static constexpr int kPrefixSums = kBankRows > 0 ? 4 : 1;
  static constexpr bool kCopiesPrefix = kBankRows == 0 && !HAS_OUTPUT_NORM;

  static_assert(N >= 1 && N <= 9, "The operator reads at most eight bank rows.");
  static_assert(H % (CLUSTER * Policy::kElementsPerThread * 32) == 0,
                "A row must divide into 16-byte vectors of full warps of the blocks of a cluster.");
  static_assert(kSenders <= 32, "A receiver adds up at most 32 partial sums.");
  static_assert(!STATIC_COMMON_PATH || HAS_OUTPUT_NORM,
                "The static common path has an output norm.");
};

namespace cluster {

// Partial sums by value, then sender; 36 floats apart so that eight lanes read eight bank groups.
inline constexpr int kSumStride = 36;

}  // namespace cluster

template <typename T>
struct alignas(128) ClusterSharedStorage {
  alignas(16) float bank_sums[T::kBankRows > 0 ? T::kBankSums : 1][cluster::kSumStride];
  alignas(16) float prefix_sums[4][cluster::kSumStride];
  alignas(16) float exact_squares[cluster::kSumStride];
  alignas(8) uint64_t bank_arrived, prefix_arrived, exact_arrived;
};

// One thread: its 8 columns of every row of the token.
template <typename T>
class ClusterThread {
 public:
  __device__ __forceinline__ ClusterThread(const typename T::Params& params,
                                           ClusterSharedStorage<T>& storage)
      : params_(params),
        storage_(storage),
        rank_(ptx::cluster_rank()),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        token_(blockIdx.x / T::kCluster),
        column_(rank_ * T::kColumns + threadIdx.x * 8) {}

  // Clears what nobody sends, arms the barriers and announces both to the cluster.
  __device__ __forceinline__ void initialise_exchange() {
    if constexpr (T::kSenders < 32) {
      for (int i = threadIdx.x;
           i < static_cast<int>(offsetof(ClusterSharedStorage<T>, bank_arrived) / 4);
           i += T::kBlockSize) {
        reinterpret_cast<float*>(&storage_)[i] = 0.0f;
      }
    }
    if (threadIdx.x == 0) {
      arm(storage_.bank_arrived, T::kBankSums);
      arm(storage_.prefix_arrived, T::kPrefixSums);
      arm(storage_.exact_arrived, 1);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive();
  }

  __device__ __forceinline__ void load_weights() {
    const uint4 norm = ptx::load_read_only(bf16(params_.norm_weight) + column_);
    const uint4 qk = ptx::load_read_only(bf16(params_.qk_weight) + column_);
    if constexpr (T::kHasOutputNorm) {
      output_weight_ = ptx::load_read_only(bf16(params_.output_norm_weight) + column_);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) query_[i] = mul2(unpack(word(norm, i)), unpack(word(qk, i)));
  }

  __device__ __forceinline__ void load_bank() {
    if constexpr (T::kPremixed) {
      const int64_t element = token_ * params_.bank_stride + column_;
      if constexpr (T::kFloatBank) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          bank_[half] =
              ptx::load_global(static_cast<const float*>(params_.bank) + element + half * 4);
        }
      } else {
        bank_[0] = ptx::load_global(bf16(params_.bank) + element);
      }
      max_ = __fmul_rn(params_.lse[token_], kLog2E);
      sum_ = 1.0f;
      return;
    }
    const auto* bank = bf16(params_.blocks) + token_ * params_.blocks_token_stride + column_;
#pragma unroll
    for (int row = 0; row < T::kBankRows; ++row) {
      bank_[row] = ptx::load_global(bank + row * params_.blocks_row_stride);
    }
  }

  __device__ __forceinline__ void load_prefix() {
    prefix_ = ptx::load_global(bf16(params_.prefix) + token_ * params_.prefix_stride + column_);
    if (has_delta()) {
      delta_ = ptx::load_global(bf16(params_.delta) + token_ * params_.delta_stride + column_);
    }
  }

  // Bank exchange: the weighted sum of the bank rows.
  __device__ __forceinline__ void mix_bank() {
    if constexpr (T::kPremixed) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mixed_[i] = T::kFloatBank ? make_float2(__uint_as_float(word(bank_[i / 2], i % 2 * 2)),
                                                __uint_as_float(word(bank_[i / 2], i % 2 * 2 + 1)))
                                  : unpack(word(bank_[0], i));
      }
      ptx::cluster_wait();
    } else if constexpr (T::kBankRows > 0) {
      float sums[T::kBankSums];
#pragma unroll
      for (int row = 0; row < T::kBankRows; ++row) {
        square_and_dot(bank_[row], sums[2 * row], sums[2 * row + 1]);
      }
      ptx::cluster_wait();
      send(sums, storage_.bank_sums[0], storage_.bank_arrived);
      ptx::mbarrier_wait_cluster(ptx::shared_address(&storage_.bank_arrived), 0);
      weigh_bank(ptx::shared_address(storage_.bank_sums));
    } else {
      ptx::cluster_wait();
    }
  }

  // Every thread of the block has issued its last load. A launch that writes the bank releases its
  // dependents by ending instead, after those stores.
  __device__ __forceinline__ void release_dependents() const {
    if (writes_bank()) return;
    __syncthreads();
    if (threadIdx.x == 0) ptx::griddepcontrol_launch_dependents();
  }

  // Forms p, writes it where it goes, and sends the prefix exchange.
  __device__ __forceinline__ void take_prefix() {
    if (has_delta()) {
#pragma unroll
      for (int i = 0; i < 4; ++i) word(prefix_, i) = add(word(prefix_, i), word(delta_, i));
      ptx::store_global(
          static_cast<__nv_bfloat16*>(params_.prefix) + token_ * params_.prefix_stride + column_,
          prefix_);
    }
    if (writes_bank()) {
      ptx::store_global(static_cast<__nv_bfloat16*>(params_.blocks) +
                            token_ * params_.blocks_token_stride +
                            params_.block_write_idx * params_.blocks_row_stride + column_,
                        prefix_);
    }
    if constexpr (!T::kCopiesPrefix) {
      float sums[T::kPrefixSums];
      float dot;
      square_and_dot(prefix_, sums[0], dot);
      if constexpr (T::kBankRows > 0) {
        float2 squares = make_float2(0.0f, 0.0f), dots = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          squares = fma2(mixed_[i], mixed_[i], squares);
          dots = fma2(unpack(word(prefix_, i)), mixed_[i], dots);
        }
        sums[1] = dot;
        sums[2] = dots.x + dots.y;
        sums[3] = squares.x + squares.y;
      }
      send(sums, storage_.prefix_sums[0], storage_.prefix_arrived);
    }
  }

  // Receives the prefix exchange and writes the output.
  __device__ __forceinline__ void finish() {
    Shares shares;
    if constexpr (!T::kCopiesPrefix) {
      ptx::mbarrier_wait_cluster(ptx::shared_address(&storage_.prefix_arrived), 0);
      shares = share_prefix();
    }
    uint4 result = prefix_;
    if constexpr (!T::kCopiesPrefix) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 value = mul2(make_float2(shares.prefix, shares.prefix), unpack(word(prefix_, i)));
        if constexpr (T::kBankRows > 0) {
          value = fma2(make_float2(shares.mixed, shares.mixed), mixed_[i], value);
        }
        if constexpr (T::kHasOutputNorm) value = mul2(value, unpack(word(output_weight_, i)));
        word(result, i) = pack(value);
      }
    }
    ptx::store_global(
        static_cast<__nv_bfloat16*>(params_.output) + token_ * params_.output_stride + column_,
        result);
  }

 private:
  static __device__ __forceinline__ const __nv_bfloat16* bf16(const void* pointer) {
    return static_cast<const __nv_bfloat16*>(pointer);
  }
  __device__ __forceinline__ bool has_delta() const {
    return T::kStaticCommonPath || params_.delta != nullptr;
  }
  __device__ __forceinline__ bool writes_bank() const {
    return !T::kStaticCommonPath && params_.block_write_idx >= 0;
  }

  // --- exchange ----------------------------------------------------------------------------------

  __device__ __forceinline__ void arm(uint64_t& barrier, int values) const {
    const uint32_t address = ptx::shared_address(&barrier);
    ptx::mbarrier_init(address, 1);
    ptx::mbarrier_arrive_expect_tx(address, values * T::kSenders * 4);
  }

  // Each value's sum over the warp goes to every block of the cluster, into this warp's place.
  template <int V>
  __device__ __forceinline__ void send(float (&sums)[V], const float* first,
                                       const uint64_t& barrier) const {
    const int index = transposed_index<V>(lane_);
    const float sum = transposed_sum<V>(sums, lane_);
    if (index < 0) return;
    const uint32_t address =
        ptx::shared_address(first) + (index * cluster::kSumStride + rank_ * T::kWarps + warp_) * 4;
    const uint32_t arrived = ptx::shared_address(&barrier);
#pragma unroll
    for (int peer = 0; peer < T::kCluster; ++peer) {
      ptx::store_async(ptx::map_to_rank(address, peer), sum, ptx::map_to_rank(arrived, peer));
    }
  }

  // Sum of the senders' values for `value`, spread over 32 / VALUES lanes; every one of them gets it.
  template <int VALUES>
  __device__ __forceinline__ float sum_of_senders(uint32_t sums, uint32_t value) const {
    constexpr int kLanes = 32 / VALUES;
    constexpr int kGroups = 8 / kLanes > 0 ? 8 / kLanes : 1;  // of four senders, for each lane
    const uint32_t part = lane_ % kLanes;
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t offset = (value * cluster::kSumStride + (group * kLanes + part) % 8 * 4) * 4;
      const float4 four = ptx::load_shared_float4(sums + offset);
      sum += (four.x + four.y) + (four.z + four.w);
    }
#pragma unroll
    for (int offset = kLanes < 8 ? kLanes / 2 : 4; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    return sum;
  }

  // --- arithmetic ----------------------------------------------------------------------------------

  __device__ __forceinline__ void square_and_dot(const uint4& row, float& square_sum,
                                                 float& dot) const {
    float2 squares = make_float2(0.0f, 0.0f), dots = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = unpack(word(row, i));
      squares = fma2(v, v, squares);
      dots = fma2(v, query_[i], dots);
    }
    square_sum = squares.x + squares.y;
    dot = dots.x + dots.y;
  }

  // Softmax over the bank rows, four lanes a row: two for its squares, two for its dot.
  __device__ __forceinline__ void weigh_bank(uint32_t sums) {
    const uint32_t row = lane_ / 4;
    const uint32_t value = lane_ / 2;
    const float sum = sum_of_senders<16>(sums, value < T::kBankSums ? value : 0);
    const float other = __shfl_xor_sync(0xffffffffu, sum, 2);
    const bool holds_squares = (lane_ & 2) == 0;
    const float row_score = row < T::kBankRows
                                ? score<T::kHidden>(holds_squares ? sum : other,
                                                    holds_squares ? other : sum, params_.eps)
                                : -INFINITY;
    max_ = row_score;
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      max_ = fmaxf(max_, __shfl_xor_sync(0xffffffffu, max_, offset));
    }
    const float weight = ptx::exp2_approx(row_score - max_);
    sum_ = weight;
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2)
      sum_ += __shfl_xor_sync(0xffffffffu, sum_, offset);
#pragma unroll
    for (int r = 0; r < T::kBankRows; ++r) {
      const float w = __shfl_sync(0xffffffffu, weight, 4 * r);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = unpack(word(bank_[r], i));
        mixed_[i] = r == 0 ? mul2(make_float2(w, w), v) : fma2(make_float2(w, w), v, mixed_[i]);
      }
    }
  }

  // The factors of `mixed` and p in the output, output norm included.
  __device__ __forceinline__ Shares share_prefix() {
    const float sum = sum_of_senders<4>(ptx::shared_address(storage_.prefix_sums), lane_ / 8);
    const float prefix_square = __shfl_sync(0xffffffffu, sum, 0);
    Shares shares;
    if constexpr (T::kBankRows > 0) {
      const float dot = __shfl_sync(0xffffffffu, sum, 8);
      shares = join_prefix(max_, sum_, score<T::kHidden>(prefix_square, dot, params_.eps));
    }
    if constexpr (T::kHasOutputNorm) {
      float square = prefix_square;
      if constexpr (T::kBankRows > 0) {
        const float prefix_mixed = __shfl_sync(0xffffffffu, sum, 16);
        const float mixed_square = __shfl_sync(0xffffffffu, sum, 24);
        const ExpandedSquare expanded =
            expand_square(shares, mixed_square, prefix_mixed, prefix_square);
        square = expanded.cancels ? exact_square(shares) : expanded.value;
      }
      normalise<T::kHidden>(shares, square, params_.output_norm_eps);
    } else {
      average(shares);
    }
    return shares;
  }

  // |mixed shares.mixed + p shares.prefix|^2 from its elements. Every block of the cluster comes here or
  // none: the decision rests on sums that all of them computed alike.
  __device__ __forceinline__ float exact_square(const Shares& shares) {
    float2 squares = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 value =
          fma2(make_float2(shares.mixed, shares.mixed), mixed_[i],
               mul2(make_float2(shares.prefix, shares.prefix), unpack(word(prefix_, i))));
      squares = fma2(value, value, squares);
    }
    float sums[1] = {squares.x + squares.y};
    send(sums, storage_.exact_squares, storage_.exact_arrived);
    ptx::mbarrier_wait_cluster(ptx::shared_address(&storage_.exact_arrived), 0);
    return sum_of_senders<1>(ptx::shared_address(storage_.exact_squares), 0);
  }

  const typename T::Params& params_;
  ClusterSharedStorage<T>& storage_;
  const uint32_t rank_, lane_, warp_;
  const int64_t token_;
  const int column_;
  uint4 bank_[T::kBankVectors];
  uint4 prefix_ = make_uint4(0, 0, 0, 0), delta_ = make_uint4(0, 0, 0, 0);
  uint4 output_weight_ = make_uint4(0, 0, 0, 0);
  float2 query_[4] = {};
  float2 mixed_[4] = {};
  float max_, sum_;
};

template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
__global__ void __launch_bounds__(
    (ClusterTraits<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize))
    forward_cluster_kernel(const __grid_constant__ ForwardParams params) {
  using T = ClusterTraits<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>;
  __shared__ ClusterSharedStorage<T> storage;
  ClusterThread<T> thread(params, storage);
  const bool early = T::kBankRows > 0 && params.early;
  thread.initialise_exchange();
  thread.load_weights();
  if (!early) ptx::griddepcontrol_wait();
  thread.load_bank();
  if (early) ptx::griddepcontrol_wait();
  thread.load_prefix();
  thread.release_dependents();
  thread.mix_bank();
  thread.take_prefix();
  thread.finish();
}

template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t ClusterInstance<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize =
    ClusterTraits<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize;

template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const void* ClusterInstance<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::function() {
  return reinterpret_cast<const void*>(
      &forward_cluster_kernel<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>);
}

template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
cudaError_t ClusterInstance<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::launch(
    const ForwardParams& params, const LaunchShape& shape, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {CLUSTER, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.grid_size);
  config.blockDim = dim3(kBlockSize);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = shape.programmatic ? 2 : 1;
  return cudaLaunchKernelEx(
      &config, &forward_cluster_kernel<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>, params);
}

}  // namespace attnres
