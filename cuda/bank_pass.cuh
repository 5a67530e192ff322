// SPDX-License-Identifier: Apache-2.0
// Bank kernel: the bank's share of S calls in one pass over its rows, on tensor cores (arXiv 2603.15031).
//
// Contract. For each bank entry t < T and each site s < S, with q_s = norm_weights[s] qk_weights[s]:
//
//   score_i    = dot(v_i, q_s) rsqrt(mean(v_i^2) + eps)          for the num_blocks bank rows v_i
//   bank[s, t] = sum softmax(score)_i v_i,   lse[s, t] = log sum exp(score_i)
//
// Bytes moved, per entry: num_blocks rows read once for each part of the sites, at most 24, and S written.
//
// A cluster of 8 blocks works on a group of one or two entries at a time, for up to 24 sites; each block owns 1/8 of
// the columns and holds them of six groups in shared memory. Scores and sums are float32 products of tensor
// cores: q is a product of two bfloat16, so two bfloat16 hold it to the bit; a weight is split in three.
//
// Who waits for whom. Blocks are persistent. Everything of a group lies in the buffers of its stage.
// - A producer thread announces the group's weights (weighed) and fills the stage with bulk copies (full).
// - Eight score warps split a block's columns. Their partial sums are added in a fixed order and sent, an eighth of
//   the entries' sites to each block of the cluster (arrived).
// - Two softmax warps turn their block's eighth into weights and send these to every block (weighed).
// - Eight mix warps multiply weights and rows, store the result, and hand the stage back (empty).
// No more is needed: that a stage is full again means that its weights were used here, hence had come from every
// block, hence that all had read the sums sent to them. So nothing is sent to a buffer that is still read, and a
// block ends only after it has received all that is sent to it.
// Queries are read before griddepcontrol.wait, and rows after it; all that is written follows from rows.
#pragma once

#include "bank_share.hpp"
#include "device/bf16.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "two_phase.hpp"

namespace attnres {

template <int H, bool FLOAT_BANK>
struct BankTraits {
  static constexpr int kHidden = H;
  static constexpr bool kFloatBank = FLOAT_BANK;
  static constexpr int kCluster = kBankClusterSize;
  static constexpr int kColumns = H / kCluster;
  static constexpr int kEntries = kBankEntriesPerGroup;
  static constexpr int kSites = kBankSitesPerPart;
  static constexpr int kRowsPerEntry = 8;
  static constexpr int kRows = kEntries * kRowsPerEntry;
  static constexpr int kRowBytes = kColumns * 2;
  // An odd number of 16-byte units, so that eight rows of a matrix lie in different banks.
  static constexpr int kRowStride = kRowBytes + 16;
  static constexpr int kStages = 6;
  static constexpr int kWarps = 8;  // that score, and as many that mix
  static constexpr int kSoftmaxWarps = 2;
  static constexpr int kGroupThreads = kWarps * 32;
  static constexpr int kBlockSize = 2 * kGroupThreads + 128;  // and a warp group for the rest
  static constexpr int kSteps = kColumns / kWarps / 16;       // of 16 columns, for each score warp
  static constexpr int kSums = kSites + 1;                    // of a row: its dots, and its square
  static constexpr int kChunks = kColumns / 32;               // of 32 columns, to mix
  // The last stages hold the weights of the queries, of both kinds, before they hold rows.
  static constexpr int kWeightStages = (2 * kSites + kRows - 1) / kRows;
  static constexpr int kFreeStages = kStages - kWeightStages;
  // What a block gets from each block: of its eighth of the entries' sites the dots, and squares of their rows.
  static constexpr int kMaxSlice = kEntries * kSites / kCluster * kRowsPerEntry + kRowsPerEntry;

  // Registers of a thread that scores, mixes, and does the rest: at most 65,536 / kBlockSize on average. With
  // fewer to mix, or more to score, one of the kernels spills on one of the targets.
  static constexpr int kScoreRegisters = FLOAT_BANK ? 152 : 144;
  static constexpr int kMixRegisters = FLOAT_BANK ? 72 : 80;
  static constexpr int kOtherRegisters = 32;
  static_assert(kGroupThreads * (kScoreRegisters + kMixRegisters) + 128 * kOtherRegisters <=
                    65536 / kBlockSize / 8 * 8 * kBlockSize,
                "A block has the registers that it is launched with.");

  static_assert(H % (kCluster * kWarps * 16) == 0,
                "A row must divide into 16 columns of all warps of a cluster.");
  static_assert(kRowStride / 16 % 2 == 1 && kColumns % 32 == 0);
  static_assert(kSites == 24 && kEntries == 2 && kSoftmaxWarps * 32 >= kMaxSlice - kRowsPerEntry,
                "Tiles of the tensor cores are laid out for these.");
};

template <typename T>
struct alignas(128) BankStorage {
  alignas(128) unsigned char rows[T::kStages][T::kRows * T::kRowStride];
  alignas(16) float partial[T::kWarps][T::kRows * T::kSums];
  alignas(16) float received[T::kStages][T::kCluster][T::kMaxSlice];
  alignas(16) float weights[T::kStages][T::kEntries * T::kSites][T::kRowsPerEntry];
  alignas(8) uint64_t full[T::kStages];
  uint64_t arrived[T::kStages];
  uint64_t weighed[T::kStages];
  uint64_t empty[T::kStages];
  uint64_t queries, queries_taken;
};

namespace bank {

// This cluster's entries and sites.
template <typename T>
struct Share : BankShare {
  __device__ __forceinline__ explicit Share(const BankParams& params)
      : BankShare(params, blockIdx.x / T::kCluster, gridDim.x / T::kCluster) {}

  // Sums that a block gets from another: of its pairs, and the squares of an entry's rows.
  __device__ __forceinline__ int slice() const {
    return (pairs_per_block() + 1) * T::kRowsPerEntry;
  }
};

// Position among the stages; every warp walks them in the same order.
template <typename T>
struct StageCursor {
  uint32_t stage = 0;
  uint32_t parity;

  __device__ __forceinline__ explicit StageCursor(uint32_t first_parity) : parity(first_parity) {}
  __device__ __forceinline__ void advance() {
    if (++stage == T::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Where the weights of the first site lie: of the norm first, then those of the scores.
template <typename T>
__device__ __forceinline__ uint32_t weights_of(BankStorage<T>& storage, int kind) {
  return ptx::shared_address(storage.rows[T::kFreeStages]) + kind * (T::kSites * T::kRowStride);
}

// One thread for each kind of weights.
template <typename T>
__device__ __forceinline__ void copy_weights(const BankParams& params, BankStorage<T>& storage,
                                             int column, int kind) {
  const Share<T> share(params);
  const int64_t stride = kind == 0 ? params.norm_weights_stride : params.qk_weights_stride;
  const auto* weights =
      static_cast<const __nv_bfloat16*>(kind == 0 ? params.norm_weights : params.qk_weights) +
      column + int64_t{share.site} * stride;
  const uint32_t destination = weights_of(storage, kind);
  const uint32_t queries = ptx::shared_address(&storage.queries);
  ptx::mbarrier_arrive_expect_tx(queries, share.sites * T::kRowBytes);
#pragma unroll 1
  for (int site = 0; site < share.sites; ++site) {
    ptx::bulk_copy(destination + site * T::kRowStride, weights + site * stride, T::kRowBytes,
                   queries);
  }
}

// The producer thread: the rows of every group.
template <typename T>
__device__ __forceinline__ void produce(const BankParams& params, BankStorage<T>& storage,
                                        int column) {
  const Share<T> share(params);
  ptx::griddepcontrol_wait();
  const auto* blocks = static_cast<const __nv_bfloat16*>(params.blocks) + column;
  const uint32_t weight_bytes = T::kCluster * share.pairs_per_block() * T::kRowsPerEntry * 4;
  StageCursor<T> cursor(1);  // the first pass over the stages finds every one empty
  BankShare::Group group;
  for (int32_t round = 0; share.group_of(round, group); ++round) {
    if (round == T::kFreeStages) {
      ptx::mbarrier_wait(ptx::shared_address(&storage.queries_taken), 0);
    }
    ptx::mbarrier_wait(ptx::shared_address(&storage.empty[cursor.stage]), cursor.parity);
    // No sooner: only an empty stage is sure to have had the weights of its last group from every block. (The softmax
    // warps may be a whole pass over the stages ahead of another block's.)
    ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&storage.weighed[cursor.stage]),
                                   weight_bytes);
    const uint32_t full = ptx::shared_address(&storage.full[cursor.stage]);
    ptx::mbarrier_arrive_expect_tx(full, group.entries * params.num_blocks * T::kRowBytes);
    const uint32_t rows = ptx::shared_address(storage.rows[cursor.stage]);
#pragma unroll 1
    for (int e = 0; e < group.entries; ++e) {
      const auto* entry = blocks + int64_t{group.token + e} * params.blocks_token_stride;
#pragma unroll 1
      for (int row = 0; row < params.num_blocks; ++row) {
        ptx::bulk_copy(rows + (e * T::kRowsPerEntry + row) * T::kRowStride,
                       entry + row * params.blocks_row_stride, T::kRowBytes, full);
      }
    }
    cursor.advance();
  }
  ptx::griddepcontrol_launch_dependents();
}

template <typename T>
class ScoreWarp {
 public:
  __device__ __forceinline__ ScoreWarp(const BankParams& params, BankStorage<T>& storage,
                                       uint32_t rank)
      : params_(params),
        share_(params),
        storage_(storage),
        rank_(rank),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {}

  // This warp's columns of the queries, as operands B: site 8 j + g, in two bfloat16. A site that there is
  // not has what happens to lie there; its scores are read by nobody.
  __device__ __forceinline__ void take_queries() {
    ptx::mbarrier_wait(ptx::shared_address(&storage_.queries), 0);
    const uint32_t at = lane_ / 4 * T::kRowStride + warp_ * (T::kSteps * 32) + lane_ % 4 * 4;
    const uint32_t norm = weights_of(storage_, 0) + at;
    const uint32_t qk = weights_of(storage_, 1) + at;
#pragma unroll
    for (int k = 0; k < T::kSteps; ++k) {
#pragma unroll
      for (int j = 0; j < 3; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int offset = j * 8 * T::kRowStride + k * 32 + half * 16;
          float2 rest;
          query_[k][j][half] = split(mul2(unpack(ptx::load_shared_word(norm + offset)),
                                          unpack(ptx::load_shared_word(qk + offset))),
                                     rest);
          query_[k][j + 3][half] = pack(rest);
        }
      }
    }
    // Rows of an entry that no copy fills have weight 0, and must be finite for that. (The first stages may be
    // receiving others than these; the last hold no rows yet.)
    ptx::named_barrier_sync(1, T::kGroupThreads);
    const int unused = T::kRowsPerEntry - params_.num_blocks;
    constexpr int kVectors = T::kRowStride / 16;
    for (int i = warp_; i < T::kStages * T::kEntries * unused; i += T::kWarps) {
      const int entry = i / unused, row = params_.num_blocks + i % unused;  // of all stages
      const uint32_t first =
          ptx::shared_address(storage_.rows[0]) + (entry * T::kRowsPerEntry + row) * T::kRowStride;
      for (int v = lane_; v < kVectors; v += 32) {
        ptx::store_shared(first + v * 16, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
      }
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_.queries_taken));
  }

  __device__ __forceinline__ void run() {
    StageCursor<T> cursor(0);
    BankShare::Group group;
    for (int32_t round = 0; share_.group_of(round, group); ++round) {
      multiply(cursor);
      send(cursor.stage);
      cursor.advance();
    }
  }

 private:
  // This warp's share of a group's scores and squares.
  __device__ __forceinline__ void multiply(const StageCursor<T>& cursor) {
    ptx::mbarrier_wait(ptx::shared_address(&storage_.full[cursor.stage]), cursor.parity);
    const uint32_t rows = ptx::shared_address(storage_.rows[cursor.stage]) +
                          lane_ % 16 * T::kRowStride + lane_ / 16 * 16 + warp_ * (T::kSteps * 32);
#pragma unroll
    for (int j = 0; j < 6; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores_[j][i] = 0.0f;
    }
    squares_[0] = squares_[1] = 0.0f;
#pragma unroll
    for (int k = 0; k < T::kSteps; ++k) {
      uint32_t a[4];
      ptx::load_matrices(a, rows + k * 32);
#pragma unroll
      for (int j = 0; j < 6; ++j) ptx::mma(scores_[j], a, query_[k][j][0], query_[k][j][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = unpack(a[i]);
        squares_[i % 2] = __fmaf_rn(v.x, v.x, __fmaf_rn(v.y, v.y, squares_[i % 2]));
      }
    }
  }

  // Adds up the warps' shares; each warp sends to one block of the cluster.
  __device__ __forceinline__ void send(uint32_t stage) {
    ptx::named_barrier_sync(1, T::kGroupThreads);  // the partial sums before are read
    float* partial = storage_.partial[warp_];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* row = partial + (h * 8 + lane_ / 4) * T::kSums;
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        const int site = j * 8 + lane_ % 4 * 2;
        row[site] = scores_[j][2 * h] + scores_[j + 3][2 * h];
        row[site + 1] = scores_[j][2 * h + 1] + scores_[j + 3][2 * h + 1];
      }
      float square = squares_[h];
      square += __shfl_xor_sync(0xffffffffu, square, 1);
      square += __shfl_xor_sync(0xffffffffu, square, 2);
      if (lane_ % 4 == 0) row[T::kSites] = square;
    }
    ptx::named_barrier_sync(1, T::kGroupThreads);
    const int pairs = share_.pairs_per_block(), slice = share_.slice();
    const int entry = warp_ * pairs / T::kSites, first_site = warp_ * pairs % T::kSites;
    const float* first = storage_.partial[0] + entry * (T::kRowsPerEntry * T::kSums);
    const uint32_t peer = warp_;
    const uint32_t arrived = ptx::map_to_rank(ptx::shared_address(&storage_.arrived[stage]), peer);
    const uint32_t received =
        ptx::map_to_rank(ptx::shared_address(storage_.received[stage][rank_]), peer);
    for (int i = lane_; i < slice; i += 32) {
      const int pair = i / T::kRowsPerEntry, row = i % T::kRowsPerEntry;
      const float* sums = first + row * T::kSums + (pair < pairs ? first_site + pair : T::kSites);
      float sum = sums[0];
#pragma unroll
      for (int w = 1; w < T::kWarps; ++w) sum += sums[w * (T::kRows * T::kSums)];
      ptx::store_async(received + i * 4, sum, arrived);
    }
  }

  const BankParams& params_;
  const Share<T> share_;
  BankStorage<T>& storage_;
  const uint32_t rank_, lane_, warp_;
  uint32_t query_[T::kSteps][6][2];
  float scores_[6][4];
  float squares_[2];
};

// Softmax of this block's pairs of an entry and a site, eight lanes a pair.
template <typename T>
__device__ __forceinline__ void weigh_pairs(const BankParams& params, BankStorage<T>& storage,
                                            uint32_t rank) {
  const Share<T> share(params);
  const int pairs = share.pairs_per_block(), slice = share.slice();
  const int item = threadIdx.x - (T::kBlockSize - T::kSoftmaxWarps * 32);
  const int row = item % T::kRowsPerEntry;
  const bool has_pair = item < pairs * T::kRowsPerEntry;
  const int dot_at = has_pair ? item : row, square_at = pairs * T::kRowsPerEntry + row;
  const int pair = rank * pairs + dot_at / T::kRowsPerEntry;  // of the group
  const int entry = pair / T::kSites, site = pair % T::kSites;
  StageCursor<T> cursor(0);
  BankShare::Group group;
  for (int32_t round = 0; share.group_of(round, group); ++round) {
    const uint32_t arrived = ptx::shared_address(&storage.arrived[cursor.stage]);
    const uint32_t weighed = ptx::shared_address(&storage.weighed[cursor.stage]);
    if (item == 0) ptx::mbarrier_arrive_expect_tx(arrived, T::kCluster * slice * 4);
    ptx::mbarrier_wait_cluster(arrived, cursor.parity);
    float dot = 0.0f, square = 0.0f;
#pragma unroll
    for (int source = 0; source < T::kCluster; ++source) {
      const uint32_t sums = ptx::shared_address(storage.received[cursor.stage][source]);
      dot += ptx::load_shared_float(sums + dot_at * 4);
      square += ptx::load_shared_float(sums + square_at * 4);
    }
    const float own =
        row < params.num_blocks ? score<T::kHidden>(square, dot, params.eps) : -INFINITY;
    float max = own;
#pragma unroll
    for (int o = 1; o < 8; o *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, o));
    const float power = ptx::exp2_approx(own - max);
    float sum = power;
#pragma unroll
    for (int o = 1; o < 8; o *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    const float weight = power * __frcp_rn(sum);
    if (has_pair) {
      const uint32_t destination = ptx::shared_address(&storage.weights[cursor.stage][pair][row]);
#pragma unroll
      for (int peer = 0; peer < T::kCluster; ++peer) {
        ptx::store_async(ptx::map_to_rank(destination, peer), weight,
                         ptx::map_to_rank(weighed, peer));
      }
      if (row == 0 && site < share.sites && entry < group.entries) {
        params.lse[(share.site + site) * params.lse_stride + group.token + entry] =
            (max + log2f(sum)) * (1.0f / kLog2E);
      }
    }
    cursor.advance();
  }
}

// Mixes an eighth of a group's chunks of 32 columns.
template <typename T>
class MixWarp {
 public:
  __device__ __forceinline__ MixWarp(const BankParams& params, BankStorage<T>& storage, int column)
      : params_(params),
        share_(params),
        storage_(storage),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32 % T::kWarps),
        column_(column) {}

  __device__ __forceinline__ void run() {
    // These chunks are of one entry: for H = 7168 a warp has 3 or 4, or 7, of the 28 of an entry.
    const int begin = warp_ * (share_.entries * T::kChunks) / T::kWarps;
    const int end = (warp_ + 1) * (share_.entries * T::kChunks) / T::kWarps;
    const int entry = begin / T::kChunks;
    StageCursor<T> cursor(0);
    BankShare::Group group;
    for (int32_t round = 0; share_.group_of(round, group); ++round) {
      ptx::mbarrier_wait_cluster(ptx::shared_address(&storage_.weighed[cursor.stage]),
                                 cursor.parity);
      if (entry < group.entries) {
        mix(entry, group.token + entry, cursor.stage, begin - entry * T::kChunks,
            end - entry * T::kChunks);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_.empty[cursor.stage]));
      cursor.advance();
    }
  }

 private:
  // Sites are rows of D: 0 to 15, and 16 to 23 with nothing after them. The bank's rows are k, 8 of them, so
  // that an instruction of 16 takes two parts of a weight, and one of 8 the last.
  __device__ __forceinline__ void mix(int entry, int32_t token, uint32_t stage, int first,
                                      int last) const {
    uint32_t part[3][3];  // tile of eight sites, part of the weight
#pragma unroll
    for (int m = 0; m < 3; ++m) {
      float2 rest = ptx::load_shared_float2(
          ptx::shared_address(&storage_.weights[stage][entry * T::kSites + m * 8][0]) + lane_ * 8);
      part[m][0] = split(rest, rest);
      part[m][1] = split(rest, rest);
      part[m][2] = pack(rest);
    }
    const uint32_t low[4] = {part[0][0], part[1][0], part[0][1], part[1][1]};
    const uint32_t high[4] = {part[2][0], 0, part[2][1], 0};
    // Operand B, columns g of four tiles, has columns 8 (g / 2) + g % 2 of 32 and those 2, 4 and 6 after it:
    // then D has eight columns in a row for each lane.
    uint32_t rows = ptx::shared_address(storage_.rows[stage]) + first * 64 +
                    (entry * T::kRowsPerEntry + lane_ % 4 * 2) * T::kRowStride + lane_ / 8 * 16;
    const uint32_t half = (lane_ & 4) != 0 ? 0x7632 : 0x5410;
    int64_t at = first * 32 + (share_.site + lane_ / 4) * params_.bank_site_stride +
                 int64_t{token} * params_.bank_token_stride + column_ + lane_ % 4 * 8;
#pragma unroll 2
    for (int chunk = first; chunk < last; ++chunk, rows += 64, at += 32) {
      const uint4 even = ptx::load_shared(rows);
      const uint4 odd = ptx::load_shared(rows + T::kRowStride);
      if constexpr (T::kFloatBank) {
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          float sums[2][2][4] = {};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply(sums[i], __byte_perm(word(even, n + i), word(odd, n + i), half), low, high,
                     part);
          }
#pragma unroll
          for (int m = 0; m < 3; ++m) {
            const int i = m % 2 * 2;
            const float4 four = make_float4(sums[0][m / 2][i], sums[0][m / 2][i + 1],
                                            sums[1][m / 2][i], sums[1][m / 2][i + 1]);
            if (has_site(m)) {
              ptx::store_global(
                  static_cast<float*>(params_.bank) + at + n * 2 + m * 8 * params_.bank_site_stride,
                  *reinterpret_cast<const uint4*>(&four));
            }
          }
        }
      } else {
        uint4 eight[3];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float sums[2][4] = {};
          multiply(sums, __byte_perm(word(even, n), word(odd, n), half), low, high, part);
#pragma unroll
          for (int m = 0; m < 3; ++m) {
            word(eight[m], n) =
                pack(make_float2(sums[m / 2][m % 2 * 2], sums[m / 2][m % 2 * 2 + 1]));
          }
        }
#pragma unroll
        for (int m = 0; m < 3; ++m) {
          if (has_site(m)) {
            ptx::store_global(
                static_cast<__nv_bfloat16*>(params_.bank) + at + m * 8 * params_.bank_site_stride,
                eight[m]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ bool has_site(int tile) const {
    return tile * 8 + static_cast<int>(lane_ / 4) < share_.sites;
  }

  // Eight columns of every site.
  static __device__ __forceinline__ void multiply(float (&sums)[2][4], uint32_t b,
                                                  const uint32_t (&low)[4],
                                                  const uint32_t (&high)[4],
                                                  const uint32_t (&part)[3][3]) {
    ptx::mma(sums[0], low, b, b);
    ptx::mma(sums[1], high, b, b);
    ptx::mma(sums[0], part[0][2], part[1][2], b);
    ptx::mma(sums[1], part[2][2], 0, b);
  }

  const BankParams& params_;
  const Share<T> share_;
  BankStorage<T>& storage_;
  const uint32_t lane_, warp_;
  const int column_;
};

}  // namespace bank

template <int H, bool FLOAT_BANK>
__global__ void __cluster_dims__(BankTraits<H, FLOAT_BANK>::kCluster, 1, 1)
    __launch_bounds__((BankTraits<H, FLOAT_BANK>::kBlockSize), 1)
        bank_kernel(const __grid_constant__ BankParams params) {
  using T = BankTraits<H, FLOAT_BANK>;
  extern __shared__ __align__(128) unsigned char memory[];
  BankStorage<T>& storage = *reinterpret_cast<BankStorage<T>*>(memory);
  static_assert(sizeof(BankStorage<T>) <= 232448, "A block has 227 KB of shared memory.");
  const uint32_t rank = ptx::cluster_rank();
  const int column = static_cast<int>(rank) * T::kColumns;
  if (threadIdx.x == 0) {
    for (int s = 0; s < T::kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&storage.full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&storage.arrived[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&storage.weighed[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&storage.empty[s]), T::kWarps);
    }
    ptx::mbarrier_init(ptx::shared_address(&storage.queries), 2);
    ptx::mbarrier_init(ptx::shared_address(&storage.queries_taken), T::kWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::cluster_arrive();  // who sends to other blocks waits until all have come here
  if (threadIdx.x < T::kGroupThreads) {
    ptx::take_registers<T::kScoreRegisters>();
    bank::ScoreWarp<T> warp(params, storage, rank);
    warp.take_queries();
    ptx::cluster_wait();
    warp.run();
  } else if (threadIdx.x < 2 * T::kGroupThreads) {
    ptx::give_registers<T::kMixRegisters>();
    bank::MixWarp<T>(params, storage, column).run();
  } else {
    ptx::give_registers<T::kOtherRegisters>();
    if (threadIdx.x >= T::kBlockSize - T::kSoftmaxWarps * 32) {
      ptx::cluster_wait();
      bank::weigh_pairs<T>(params, storage, rank);
    } else if (threadIdx.x == 2 * T::kGroupThreads) {
      bank::copy_weights<T>(params, storage, column, 0);
      bank::produce<T>(params, storage, column);
    } else if (threadIdx.x == 2 * T::kGroupThreads + 32) {
      bank::copy_weights<T>(params, storage, column, 1);
    }
  }
}

template <int H, bool FLOAT_BANK>
BankKernel BankInstance<H, FLOAT_BANK>::kernel() {
  using T = BankTraits<H, FLOAT_BANK>;
  return {.function = &bank_kernel<H, FLOAT_BANK>,
          .block_size = T::kBlockSize,
          .shared_memory = sizeof(BankStorage<T>)};
}

}  // namespace attnres
