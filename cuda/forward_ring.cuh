// SPDX-License-Identifier: Apache-2.0
// Ring kernel: AttnRes forward for throughput (arXiv 2603.15031).
//
// Contract. For each bank entry t < T and each of its B prefixes m = t B + b:
//
//   p      = prefix[m] + delta[m], one rounding; prefix[m] <- p with a delta; blocks[t, write] <- p
//   score  = dot(v, norm_weight qk_weight) rsqrt(mean(v^2) + eps)      for v in blocks[t, 0..N-2], p
//   output = sum softmax(score) v, times rsqrt(mean(.^2) + output_norm_eps) output_norm_weight
//
// Bytes moved: N - 1 bank rows once per entry, and per prefix one row each of prefix, delta, output and the
// updated prefix (and the written bank row).
//
// Who waits for whom. Blocks are persistent: block j takes entries j, j + grid, ... A producer thread
// streams rows, in the order bank rows, then (prefix, delta) per prefix, into a ring of row slots; slot i is
// guarded by full[i] (the bulk copy's bytes) and empty[i] (one arrival per consumer warp). Consumer warps
// own 1/7 of the columns each and move a row to registers as it lands; they hand a slot back past a proxy
// fence, since nothing else orders the next bulk copy into it after their loads. Rows are reduced in chunks
// of NC rows: the warps publish partial sums, and later settle the chunk into an online softmax.
// - Publishing stores to one of two buffers; the consumers meet at a named barrier, and then settle: everybody
//   adds the same partial sums in the same order. A buffer is written again two exchanges later, past a
//   barrier that everybody reaches only after reading it.
// - Bank rows give one weighted sum `mixed`, shared by the B prefixes. The last exchange carries p.p, p.q,
//   p.mixed and mixed.mixed: the prefix's score and, by expanding |corr mixed + w p|^2, the output norm.
//   Where that expansion cancels, the block sums the squares themselves in a second exchange. Its barrier
//   is that of the next entry's first chunk, where there is one.
// - The softmax maximum is refreshed only when a score exceeds it by kMaxSlack: any reference value gives
//   the same softmax, and skipping the refresh saves rescaling `mixed`.
#pragma once

#include <cstddef>

#include "device/bf16.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/softmax.cuh"
#include "instances.hpp"
#include "ring_policy.cuh"

namespace attnres {

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
struct RingTraits {
  using Policy = RingPolicy<H, N, NC, B>;
  using Params = ForwardParams;
  // Whether `mixed` is given instead of made of bank rows, and given in bfloat16: merge_ring.cuh.
  static constexpr bool kPremixed = false, kPacksMixed = false;
  static constexpr int kHidden = H;
  static constexpr int kRowsPerStage = NC;
  static constexpr int kPrefixes = B;
  static constexpr bool kHasOutputNorm = HAS_OUTPUT_NORM;
  static constexpr bool kStaticCommonPath = STATIC_COMMON_PATH;

  static constexpr int kBankRows = N - 1;
  static constexpr int kChunks = (kBankRows + NC - 1) / NC;
  static constexpr int kConsumerWarps = Policy::kConsumerWarps;
  static constexpr int kConsumers = kConsumerWarps * 32;
  static constexpr int kBlockSize = kConsumers + 32;     // and the producer warp
  static constexpr int kVectors = H / (kConsumers * 8);  // 16-byte vectors a thread holds of a row
  static constexpr int kPairs = kVectors * 4;
  static constexpr int kRowBytes = H * 2;

  // Sums per prefix: p.p, p.q, and with a bank p.mixed; plus mixed.mixed once.
  static constexpr int kSumsPerPrefix = kBankRows > 0 ? 3 : 2;
  static constexpr int kPrefixSums = kSumsPerPrefix * B + (kBankRows > 0 ? 1 : 0);
  // With one source and no output norm the output is p itself.
  static constexpr bool kCopiesPrefix = kBankRows == 0 && !HAS_OUTPUT_NORM;

  static_assert(N >= 1 && N <= 9, "The operator reads at most eight bank rows.");
  static_assert(NC >= 1 && NC <= 3, "More rows per stage do not fit in registers.");
  static_assert(H % (kConsumers * 8) == 0,
                "A row must divide into 16-byte vectors of all consumers.");
  static_assert(kConsumerWarps <= 8, "Partial sums are laid out for eight warps.");
  static_assert(!STATIC_COMMON_PATH || HAS_OUTPUT_NORM,
                "The static common path has an output norm.");
};

// By how much a score, in powers of two, may exceed the softmax's reference before that is refreshed.
inline constexpr float kMaxSlack = 8.0f;

// The output norm's weights stay in shared memory: registers are short, and a load from global memory
// would wait behind the batch's own traffic.
template <typename T, bool HAS_OUTPUT_NORM>
struct OutputNormStorage {
  alignas(128) __nv_bfloat16 output_norm_weight[T::kHidden];
  alignas(8) uint64_t weight_arrived;
};
template <typename T>
struct OutputNormStorage<T, false> {};

// norm_weight * qk_weight, as [vector][half of a vector][consumer] float4: each thread reads what it wrote.
template <typename T, bool IN_SHARED>
struct QueryStorage {
  alignas(128) float query[T::kHidden];
};
template <typename T>
struct QueryStorage<T, false> {};

template <typename T>
struct alignas(128) RingSharedStorage {
  QueryStorage<T, T::Policy::kQueryInShared> query;
  OutputNormStorage<T, T::kHasOutputNorm> output_norm;
  alignas(16) float chunk_sums[2][2 * T::kRowsPerStage][8];  // by exchange, value, warp
  alignas(16) float prefix_sums[2][T::kPrefixSums][8];
  alignas(16) float exact_squares[8];
  alignas(8) uint64_t full[T::Policy::kMaxRingRows];
  uint64_t empty[T::Policy::kMaxRingRows];
};

// Position in the ring; producer and consumers walk it in the same order.
struct RingCursor {
  uint32_t slot = 0;
  uint32_t parity;

  __device__ explicit RingCursor(uint32_t first_parity) : parity(first_parity) {}
  __device__ __forceinline__ void advance(uint32_t ring_rows) {
    if (++slot == ring_rows) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Shared-memory addresses of a block: the barriers and sums first, at fixed offsets, then the row slots.
template <typename T>
struct RingAddresses {
  using Storage = RingSharedStorage<T>;
  using OutputNorm = OutputNormStorage<T, true>;
  uint32_t base;

  __device__ __forceinline__ explicit RingAddresses(const void* memory)
      : base(ptx::shared_address(memory)) {}
  __device__ __forceinline__ uint32_t full(uint32_t slot) const {
    return base + static_cast<uint32_t>(offsetof(Storage, full)) + slot * 8;
  }
  __device__ __forceinline__ uint32_t empty(uint32_t slot) const {
    return base + static_cast<uint32_t>(offsetof(Storage, empty)) + slot * 8;
  }
  __device__ __forceinline__ uint32_t chunk_sums(uint32_t buffer) const {
    return base + static_cast<uint32_t>(offsetof(Storage, chunk_sums)) +
           buffer * static_cast<uint32_t>(sizeof(Storage::chunk_sums) / 2);
  }
  __device__ __forceinline__ uint32_t prefix_sums(uint32_t buffer) const {
    return base + static_cast<uint32_t>(offsetof(Storage, prefix_sums)) +
           buffer * static_cast<uint32_t>(sizeof(Storage::prefix_sums) / 2);
  }
  __device__ __forceinline__ uint32_t exact_squares() const {
    return base + static_cast<uint32_t>(offsetof(Storage, exact_squares));
  }
  __device__ __forceinline__ uint32_t output_norm_weight() const {
    return base + static_cast<uint32_t>(offsetof(Storage, output_norm) +
                                        offsetof(OutputNorm, output_norm_weight));
  }
  __device__ __forceinline__ uint32_t query(int vector, int half) const {
    return base + static_cast<uint32_t>(offsetof(Storage, query)) +
           ((vector * 2 + half) * T::kConsumers + threadIdx.x) * 16;
  }
  __device__ __forceinline__ uint32_t weight_arrived() const {
    return base + static_cast<uint32_t>(offsetof(Storage, output_norm) +
                                        offsetof(OutputNorm, weight_arrived));
  }
  __device__ __forceinline__ uint32_t row(uint32_t slot) const {
    return base + static_cast<uint32_t>(sizeof(Storage)) + slot * T::kRowBytes;
  }
};

template <typename T>
__device__ __forceinline__ void initialise_barriers(const RingAddresses<T>& shared,
                                                    uint32_t ring_rows) {
  // One thread of each warp, a few barriers each: initialisations by lanes of one warp would take turns.
  constexpr uint32_t kWarps = T::kBlockSize / 32;
  if (threadIdx.x % 32 == 0) {
    for (uint32_t slot = threadIdx.x / 32; slot < ring_rows; slot += kWarps) {
      ptx::mbarrier_init(shared.full(slot), 1);
      ptx::mbarrier_init(shared.empty(slot), T::kConsumerWarps);
    }
    if constexpr (T::kHasOutputNorm) {
      if (threadIdx.x == T::kConsumers) ptx::mbarrier_init(shared.weight_arrived(), 1);
    }
  }
  ptx::fence_mbarrier_init();
  __syncthreads();
}

// The producer thread: every row of every entry of this block, in ring order.
template <typename T>
__device__ __forceinline__ void produce_rows(const typename T::Params& params,
                                             const RingAddresses<T>& shared) {
  const bool has_delta = T::kStaticCommonPath || params.delta != nullptr;
  const auto* blocks = static_cast<const __nv_bfloat16*>(params.blocks);
  const auto* prefix = static_cast<const __nv_bfloat16*>(params.prefix);
  const auto* delta = static_cast<const __nv_bfloat16*>(params.delta);
  RingCursor cursor(1);  // the first pass over the ring finds every slot empty

  const auto copy_row = [&](const __nv_bfloat16* row) {
    const uint32_t full = shared.full(cursor.slot);
    ptx::mbarrier_wait(shared.empty(cursor.slot), cursor.parity);
    ptx::mbarrier_arrive_expect_tx(full, T::kRowBytes);
    ptx::bulk_copy(shared.row(cursor.slot), row, T::kRowBytes, full);
    cursor.advance(params.ring_rows);
  };

  if constexpr (T::kHasOutputNorm) {
    ptx::mbarrier_arrive_expect_tx(shared.weight_arrived(), T::kRowBytes);
    ptx::bulk_copy(shared.output_norm_weight(), params.output_norm_weight, T::kRowBytes,
                   shared.weight_arrived());
  }
  bool must_wait = true;
  if (T::kBankRows == 0 || !params.early) {
    ptx::griddepcontrol_wait();
    must_wait = false;
  }
  const int32_t entries = params.num_tokens / T::kPrefixes;
  for (int32_t entry = blockIdx.x; entry < entries; entry += gridDim.x) {
    if constexpr (T::kPremixed) {
      const auto* mixed = static_cast<const unsigned char*>(params.bank) +
                          entry * params.bank_stride * T::kMixedElementBytes;
#pragma unroll
      for (int slot = 0; slot < T::kMixedSlots; ++slot) {
        copy_row(reinterpret_cast<const __nv_bfloat16*>(mixed + slot * T::kRowBytes));
      }
    } else {
      const auto* bank = blocks + int64_t{entry} * params.blocks_token_stride;
#pragma unroll 1
      for (int row = 0; row < T::kBankRows; ++row) copy_row(bank + row * params.blocks_row_stride);
    }
    if (must_wait) {
      ptx::griddepcontrol_wait();
      must_wait = false;
    }
#pragma unroll 1
    for (int b = 0; b < T::kPrefixes; ++b) {
      const int32_t token = entry * T::kPrefixes + b;
      copy_row(prefix + int64_t{token} * params.prefix_stride);
      if (has_delta) copy_row(delta + int64_t{token} * params.delta_stride);
    }
  }
  // Every load of this block is on its way. A launch that writes the bank releases its dependents by
  // ending instead, after those stores.
  if (T::kStaticCommonPath || params.block_write_idx < 0) ptx::griddepcontrol_launch_dependents();
}

// One consumer thread: its columns of the current entry, in registers.
template <typename T>
class RingConsumer {
 public:
  __device__ __forceinline__ RingConsumer(const typename T::Params& params,
                                          const RingAddresses<T>& shared)
      : params_(params),
        shared_(shared),
        cursor_(0),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {
    const auto* norm_weight = static_cast<const __nv_bfloat16*>(params.norm_weight);
    const auto* qk_weight = static_cast<const __nv_bfloat16*>(params.qk_weight);
#pragma unroll
    for (int k = 0; k < T::kVectors; ++k) {
      const uint4 norm = ptx::load_read_only(vector_of(norm_weight, k));
      const uint4 qk = ptx::load_read_only(vector_of(qk_weight, k));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        query_[4 * k + i] = mul2(unpack(word(norm, i)), unpack(word(qk, i)));
      if constexpr (T::Policy::kQueryInShared) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 a = query_[4 * k + 2 * half], b = query_[4 * k + 2 * half + 1];
          ptx::store_shared(shared_.query(k, half), make_float4(a.x, a.y, b.x, b.y));
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int32_t entries = params_.num_tokens / T::kPrefixes;
    uint4 prefix_rows[T::kPrefixes][T::kVectors];
    int32_t unfinished = -1;  // the entry whose prefix sums are published and not yet settled
    for (int32_t entry = blockIdx.x; entry < entries; entry += gridDim.x) {
      if constexpr (T::kPremixed) {
        take_mixed(entry);
      } else {
        mix_bank<0>(prefix_rows, unfinished);
      }
      take_prefixes(entry, prefix_rows);
      unfinished = entry;
      if constexpr (!kDefersOutput) {
        meet();
        finish(entry, prefix_rows);
      }
    }
    if (kDefersOutput && unfinished >= 0) {
      meet();
      finish(unfinished, prefix_rows);
    }
  }

 private:
  static constexpr bool kDefersOutput = T::Policy::kDefersOutput && T::kChunks > 0 && !T::kPremixed;

  template <int CHUNK>
  static constexpr int kRowsOf =
      CHUNK < T::kChunks - 1 ? T::kRowsPerStage : T::kBankRows - CHUNK * T::kRowsPerStage;

  // This thread's vector k of a row starts here; k only adds a constant to the address.
  template <typename Element>
  static __device__ __forceinline__ Element* vector_of(Element* row, int k) {
    return row + threadIdx.x * 8 + k * (T::kConsumers * 8);
  }
  static __device__ __forceinline__ uint32_t vector_of(uint32_t row, int k) {
    return row + threadIdx.x * 16 + k * (T::kConsumers * 16);
  }

  // --- ring ----------------------------------------------------------------------------------------

  // Waits for the row under the cursor, moves it to registers and goes on to the next.
  __device__ __forceinline__ void take_row(uint4 (&row)[T::kVectors]) {
    ptx::mbarrier_wait(shared_.full(cursor_.slot), cursor_.parity);
#pragma unroll
    for (int k = 0; k < T::kVectors; ++k) {
      row[k] = ptx::load_shared(vector_of(shared_.row(cursor_.slot), k));
    }
    cursor_.advance(params_.ring_rows);
  }

  // Hands `count` slots from `first` back to the producer, once the whole warp has read them.
  __device__ __forceinline__ void release_rows(RingCursor first, int count) const {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_ == 0) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        ptx::mbarrier_arrive(shared_.empty(first.slot));
        first.advance(params_.ring_rows);
      }
    }
  }

  // --- exchange of partial sums ------------------------------------------------------------------

  template <int V>
  __device__ __forceinline__ void publish(float (&sums)[V], uint32_t buffer) const {
    const int index = transposed_index<V>(lane_);
    const float sum = transposed_sum<V>(sums, lane_);
    if (index >= 0) ptx::store_shared(buffer + index * 32 + warp_ * 4, sum);
  }

  // What any consumer published before is visible to all after.
  __device__ __forceinline__ void meet() const { ptx::named_barrier_sync(1, T::kConsumers); }

  template <int V>
  __device__ __forceinline__ void settle(float (&sums)[V], uint32_t buffer) const {
#pragma unroll
    for (int i = 0; i < V; ++i) sums[i] = sum_of_warps(buffer + i * 32);
  }

  // Seven warps' values, in an order that never changes.
  __device__ __forceinline__ float sum_of_warps(uint32_t address) const {
    const float4 low = ptx::load_shared_float4(address);
    const float4 high = ptx::load_shared_float4(address + 16);
    return ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + high.z);
  }

  // --- phases ------------------------------------------------------------------------------------

  // Takes the entry's weighted mean, whose weight in the softmax is exp(lse).
  __device__ __forceinline__ void take_mixed(int32_t entry) {
    const RingCursor first = cursor_;
    if constexpr (T::kPacksMixed) {
      take_row(packed_mixed_);
    } else {
      constexpr int kQuads = T::kVectors * 2 / T::kMixedSlots;  // of a thread in a slot
#pragma unroll
      for (int slot = 0; slot < T::kMixedSlots; ++slot) {
        ptx::mbarrier_wait(shared_.full(cursor_.slot), cursor_.parity);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          const uint32_t quad = (i / 2 * T::kConsumers + threadIdx.x) * 2 + i % 2;
          const float4 four = ptx::load_shared_float4(shared_.row(cursor_.slot) + quad * 16);
          mixed_[(slot * kQuads + i) * 2] = make_float2(four.x, four.y);
          mixed_[(slot * kQuads + i) * 2 + 1] = make_float2(four.z, four.w);
        }
        cursor_.advance(params_.ring_rows);
      }
    }
    release_rows(first, T::kMixedSlots);
    max_ = __fmul_rn(params_.lse[entry], kLog2E);
    sum_ = 1.0f;
  }

  // This thread's pair `i` of `mixed`.
  __device__ __forceinline__ float2 mixed(int i) const {
    if constexpr (T::kPacksMixed) {
      return unpack_anew(word(packed_mixed_[i / 4], i % 4));
    } else {
      return mixed_[i];
    }
  }

  // Mixes the entry's bank rows, chunk by chunk, and finishes the entry before under the first.
  template <int CHUNK, typename Prefixes>
  __device__ __forceinline__ void mix_bank(Prefixes& prefix_rows, int32_t unfinished) {
    if constexpr (CHUNK < T::kChunks) {
      uint4 rows[T::kRowsPerStage][T::kVectors];
      reduce_chunk<CHUNK>(rows);
      meet();
      if constexpr (CHUNK == 0) {
        if (kDefersOutput && unfinished >= 0) finish(unfinished, prefix_rows);
      }
      mix_chunk<CHUNK>(rows);
      mix_bank<CHUNK + 1>(prefix_rows, unfinished);
    }
  }

  template <int CHUNK>
  __device__ __forceinline__ void reduce_chunk(uint4 (&rows)[T::kRowsPerStage][T::kVectors]) {
    constexpr int kRows = kRowsOf<CHUNK>;
    float sums[2 * kRows];
    const RingCursor first = cursor_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) take_row(rows[r]);
    release_rows(first, kRows);
    square_and_dot<kRows, 2>(rows, sums);
    publish(sums, shared_.chunk_sums(chunk_buffer_));
  }

  // sums[STRIDE r] = v.v and sums[STRIDE r + 1] = v.q over this thread's columns of row r.
  template <int ROWS, int STRIDE, int SIZE, int V>
  __device__ __forceinline__ void square_and_dot(const uint4 (&rows)[SIZE][T::kVectors],
                                                 float (&sums)[V]) const {
    float2 squares[ROWS], dots[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) squares[r] = dots[r] = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < T::kVectors; ++k) {
      float2 query[4];
      load_query(k, query);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 v = unpack(word(rows[r][k], i));
          squares[r] = fma2(v, v, squares[r]);
          dots[r] = fma2(v, query[i], dots[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      sums[STRIDE * r] = squares[r].x + squares[r].y;
      sums[STRIDE * r + 1] = dots[r].x + dots[r].y;
    }
  }

  __device__ __forceinline__ void load_query(int k, float2 (&query)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (T::Policy::kQueryInShared) {
        const float4 four = ptx::load_shared_float4(shared_.query(k, half));
        query[2 * half] = make_float2(four.x, four.y);
        query[2 * half + 1] = make_float2(four.z, four.w);
      } else {
        query[2 * half] = query_[4 * k + 2 * half];
        query[2 * half + 1] = query_[4 * k + 2 * half + 1];
      }
    }
  }

  // Folds a chunk that everybody has published into the online softmax.
  template <int CHUNK>
  __device__ __forceinline__ void mix_chunk(uint4 (&rows)[T::kRowsPerStage][T::kVectors]) {
    constexpr int kRows = kRowsOf<CHUNK>;
    float sums[2 * kRows], scores[kRows];
    settle(sums, shared_.chunk_sums(chunk_buffer_));
    chunk_buffer_ ^= 1;
    float chunk_max = -INFINITY;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      scores[r] = score<T::kHidden>(sums[2 * r], sums[2 * r + 1], params_.eps);
      chunk_max = fmaxf(chunk_max, scores[r]);
    }
    if constexpr (CHUNK == 0) {
      max_ = chunk_max;
      sum_ = 0.0f;
    } else if (chunk_max > max_ + kMaxSlack) {
      const float correction = ptx::exp2_approx(max_ - chunk_max);
      max_ = chunk_max;
      sum_ = __fmul_rn(sum_, correction);
#pragma unroll
      for (int i = 0; i < T::kPairs; ++i)
        mixed_[i] = mul2(mixed_[i], make_float2(correction, correction));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float weight = ptx::exp2_approx(scores[r] - max_);
      sum_ += weight;
#pragma unroll
      for (int i = 0; i < T::kPairs; ++i) {
        const float2 v = unpack_anew(word(rows[r][i / 4], i % 4));
        const float2 w = make_float2(weight, weight);
        mixed_[i] = CHUNK == 0 && r == 0 ? mul2(w, v) : fma2(w, v, mixed_[i]);
      }
    }
  }

  // Updates the entry's prefixes, writes them where they go, and publishes their sums.
  template <typename Prefixes>
  __device__ __forceinline__ void take_prefixes(int32_t entry, Prefixes& prefix_rows) {
    float sums[T::kPrefixSums];
#pragma unroll
    for (int b = 0; b < T::kPrefixes; ++b) {
      load_prefix(entry * T::kPrefixes + b, prefix_rows[b]);
      if constexpr (!T::kStaticCommonPath) {
        if (params_.block_write_idx >= 0) write_bank_row(entry, prefix_rows[b]);
      }
    }
    if constexpr (!T::kCopiesPrefix)
      square_and_dot<T::kPrefixes, T::kSumsPerPrefix>(prefix_rows, sums);
    if constexpr (T::kChunks > 0) {
      float2 squares = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < T::kPairs; ++i) squares = fma2(mixed(i), mixed(i), squares);
      sums[T::kPrefixSums - 1] = squares.x + squares.y;
#pragma unroll
      for (int b = 0; b < T::kPrefixes; ++b) {
        float2 dots = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < T::kPairs; ++i) {
          // Unpacked again where registers are short for two of it, as `unpack_anew` says.
          const uint32_t pair = word(prefix_rows[b][i / 4], i % 4);
          dots = fma2(T::kPremixed ? unpack(pair) : unpack_anew(pair), mixed(i), dots);
        }
        sums[T::kSumsPerPrefix * b + 2] = dots.x + dots.y;
      }
    }
    if constexpr (!T::kCopiesPrefix) {
      prefix_buffer_ ^= 1;
      publish(sums, shared_.prefix_sums(prefix_buffer_));
    }
  }

  __device__ __forceinline__ void load_prefix(int32_t token, uint4 (&row)[T::kVectors]) {
    const RingCursor first = cursor_;
    take_row(row);
    if (T::kStaticCommonPath || params_.delta != nullptr) {
      uint4 delta[T::kVectors];
      take_row(delta);
      release_rows(first, 2);
      auto* prefix =
          static_cast<__nv_bfloat16*>(params_.prefix) + int64_t{token} * params_.prefix_stride;
#pragma unroll
      for (int k = 0; k < T::kVectors; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word(row[k], i) = add(word(row[k], i), word(delta[k], i));
        ptx::store_global(vector_of(prefix, k), row[k]);
      }
    } else {
      release_rows(first, 1);
    }
  }

  // Every bank row of the entry has been read by now: the whole ring order lies before the prefix.
  __device__ __forceinline__ void write_bank_row(int32_t entry,
                                                 const uint4 (&row)[T::kVectors]) const {
    auto* destination = static_cast<__nv_bfloat16*>(params_.blocks) +
                        int64_t{entry} * params_.blocks_token_stride +
                        params_.block_write_idx * params_.blocks_row_stride;
#pragma unroll
    for (int k = 0; k < T::kVectors; ++k) ptx::store_global(vector_of(destination, k), row[k]);
  }

  // Settles the prefix sums of an entry and writes its outputs.
  template <typename Prefixes>
  __device__ __forceinline__ void finish(int32_t entry, Prefixes& prefix_rows) {
    if constexpr (T::kCopiesPrefix) {
#pragma unroll
      for (int b = 0; b < T::kPrefixes; ++b) {
        auto* output = output_row(entry * T::kPrefixes + b);
#pragma unroll
        for (int k = 0; k < T::kVectors; ++k)
          ptx::store_global(vector_of(output, k), prefix_rows[b][k]);
      }
    } else {
      float sums[T::kPrefixSums];
      settle(sums, shared_.prefix_sums(prefix_buffer_));
#pragma unroll
      for (int b = 0; b < T::kPrefixes; ++b) {
        finish_prefix(entry * T::kPrefixes + b, prefix_rows[b], &sums[T::kSumsPerPrefix * b],
                      sums[T::kPrefixSums - 1]);
      }
    }
  }

  // sums: p.p, p.q, p.mixed of this prefix.
  __device__ __forceinline__ void finish_prefix(int32_t token, const uint4 (&row)[T::kVectors],
                                                const float* sums, float mixed_square) {
    Shares shares;
    if constexpr (T::kChunks > 0) {
      shares = join_prefix(max_, sum_, score<T::kHidden>(sums[0], sums[1], params_.eps));
    }
    if constexpr (T::kHasOutputNorm) {
      float square = sums[0];
      if constexpr (T::kChunks > 0) {
        const ExpandedSquare expanded = expand_square(shares, mixed_square, sums[2], sums[0]);
        square = expanded.cancels ? exact_square(row, shares) : expanded.value;
      }
      normalise<T::kHidden>(shares, square, params_.output_norm_eps);
    } else {
      average(shares);
    }
    if constexpr (T::kHasOutputNorm) ptx::mbarrier_wait(shared_.weight_arrived(), 0);
    auto* output = output_row(token);
#pragma unroll
    for (int k = 0; k < T::kVectors; ++k) {
      uint4 result, weight;
      if constexpr (T::kHasOutputNorm) {
        weight = ptx::load_shared(vector_of(shared_.output_norm_weight(), k));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 value =
            mul2(make_float2(shares.prefix, shares.prefix), unpack_anew(word(row[k], i)));
        if constexpr (T::kChunks > 0) {
          value = fma2(make_float2(shares.mixed, shares.mixed), mixed(4 * k + i), value);
        }
        if constexpr (T::kHasOutputNorm) value = mul2(value, unpack(word(weight, i)));
        word(result, i) = pack(value);
      }
      ptx::store_global(vector_of(output, k), result);
    }
  }

  __device__ __forceinline__ __nv_bfloat16* output_row(int32_t token) const {
    return static_cast<__nv_bfloat16*>(params_.output) + int64_t{token} * params_.output_stride;
  }

  // |mixed shares.mixed + p shares.prefix|^2 from its elements. Every consumer comes here or none: the
  // decision rests on sums that all of them computed alike.
  __device__ __forceinline__ float exact_square(const uint4 (&row)[T::kVectors],
                                                const Shares& shares) {
    float sums[1];
    float2 squares = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < T::kPairs; ++i) {
      const float2 value =
          fma2(make_float2(shares.mixed, shares.mixed), mixed(i),
               mul2(make_float2(shares.prefix, shares.prefix), unpack(word(row[i / 4], i % 4))));
      squares = fma2(value, value, squares);
    }
    sums[0] = squares.x + squares.y;
    const float sum = transposed_sum<1>(sums, lane_);
    if (lane_ == 0) ptx::store_shared(shared_.exact_squares() + warp_ * 4, sum);
    meet();
    const float square = sum_of_warps(shared_.exact_squares());
    meet();  // everybody has read before anybody writes again
    return square;
  }

  const typename T::Params& params_;
  const RingAddresses<T> shared_;
  RingCursor cursor_;
  const uint32_t lane_, warp_;
  uint32_t chunk_buffer_ = 0, prefix_buffer_ = 0;
  float2 query_[T::kPairs];          // norm_weight * qk_weight
  float2 mixed_[T::kPairs];          // sum of weight_i v_i over the bank rows so far
  uint4 packed_mixed_[T::kVectors];  // the same, where it is given in bfloat16
  float max_, sum_;                  // of the online softmax, scores in powers of two
};

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
__global__ void __launch_bounds__(
    (RingTraits<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize),
    (RingPolicy<H, N, NC, B>::kMaxCtasPerSm))
    forward_ring_kernel(const __grid_constant__ ForwardParams params) {
  using T = RingTraits<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>;
  extern __shared__ __align__(128) unsigned char memory[];
  const RingAddresses<T> shared(memory);
  initialise_barriers<T>(shared, params.ring_rows);
  if (threadIdx.x >= T::kConsumers) {
    if (threadIdx.x == T::kConsumers) produce_rows<T>(params, shared);
  } else {
    RingConsumer<T>(params, shared).run();
  }
}

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize =
    RingTraits<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize;

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kMaxCtasPerSm =
    RingPolicy<H, N, NC, B>::kMaxCtasPerSm;

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kMaxRingRows =
    RingPolicy<H, N, NC, B>::kMaxRingRows;

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kFixedSharedMemory =
    sizeof(RingSharedStorage<RingTraits<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>>);

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const void* RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::function() {
  return reinterpret_cast<const void*>(
      &forward_ring_kernel<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>);
}

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
cudaError_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::launch(
    const ForwardParams& params, const LaunchShape& shape, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.grid_size);
  config.blockDim = dim3(kBlockSize);
  config.dynamicSmemBytes = shape.shared_memory_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = shape.programmatic ? 1 : 0;
  return cudaLaunchKernelEx(
      &config, &forward_ring_kernel<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>, params);
}

}  // namespace attnres
