// SPDX-License-Identifier: Apache-2.0
//
// attnres.hpp: libattnres in C++20, inline over the C interface of attnres.h. Needs neither the
// CUDA headers nor PyTorch. Equation, shapes and precision: attnres.h.
//
// Every function is thread-safe and throws attnres::Error; a call that throws for an invalid or
// unsupported argument has written nothing. Views own nothing: the memory behind them must outlive
// the call, and for `forward` the work that it leaves on the stream.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "attnres/attnres.h"

namespace attnres {

// What a failing call throws. what() reads "argument: expected ..., got ..." for argument errors.
class Error : public std::runtime_error {
 public:
  Error(attnres_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  attnres_status status() const noexcept { return status_; }

 private:
  attnres_status status_;
};

// Storage of 16-bit elements for callers that have no type of their own.
struct bfloat16 {
  std::uint16_t bits;
};
struct float16 {
  std::uint16_t bits;
};

// The dtype of an element type. Specialise it for __nv_bfloat16, std::bfloat16_t and the like.
template <typename T>
struct element;
template <>
struct element<bfloat16> : std::integral_constant<std::int32_t, ATTNRES_BFLOAT16> {};
template <>
struct element<float16> : std::integral_constant<std::int32_t, ATTNRES_FLOAT16> {};
template <>
struct element<float> : std::integral_constant<std::int32_t, ATTNRES_FLOAT32> {};

template <typename T>
concept Element = requires { element<std::remove_const_t<T>>::value; };

// [num_tokens, H]: token m starts at data + m * stride. Strides count elements.
template <Element T>
struct RowView {
  T* data = nullptr;
  std::int64_t num_tokens = 0;
  std::int64_t stride = 0;
};

// [num_tokens, num_rows, H]: row i of entry t starts at data + t * token_stride + i * row_stride.
template <Element T>
struct BankView {
  T* data = nullptr;
  std::int64_t num_tokens = 0;
  std::int64_t num_rows = 0;
  std::int64_t token_stride = 0;
  std::int64_t row_stride = 0;
};

enum class Pdl : std::int32_t {
  wait = ATTNRES_PDL_WAIT,
  early = ATTNRES_PDL_EARLY,
  off = ATTNRES_PDL_OFF
};

// Overrides of the plan, each 0 for the plan's own choice; see attnres_forward_args.
struct PlanOverrides {
  std::int32_t kernel = ATTNRES_KERNEL_AUTO;
  std::int32_t rows_per_stage = 0;
  std::int32_t ctas_per_sm = 0;
  std::int32_t cluster_size = 0;
  std::int32_t rows_in_flight = 0;
};

// Two arguments disagree on a size, which the C structs could not express.
inline void require_same(const char* name, const char* what, std::int64_t expected,
                         std::int64_t got) {
  if (expected == got) return;
  throw Error(ATTNRES_INVALID_ARGUMENT, std::string(name) + ": expected " +
                                            std::to_string(expected) + " " + what + ", got " +
                                            std::to_string(got));
}

// One call, for designated initialisers. H is the size of norm_weight, M and T are the views'
// tokens. `prefix` with a delta, `blocks` with a write and `output` must not overlap another
// argument or themselves. Device memory for `forward` (bases and strides multiples of 16 bytes,
// bfloat16), host memory for `forward_host`.
template <Element T>
struct ForwardArgs {
  RowView<T> prefix{};                      // [M, H], updated in place when there is a delta
  RowView<const T> delta{};                 // [M, H]; without data: none
  BankView<T> blocks{};                     // [T, R, H]
  std::span<const T> norm_weight{};         // [H]
  std::span<const T> qk_weight{};           // [H]
  std::span<const T> output_norm_weight{};  // [H]; empty: no output norm
  std::int32_t num_blocks = 0;              // bank rows read, 0..min(8, R)
  std::int32_t block_write_idx = -1;        // bank row that receives p, -1 for none
  float eps = 1e-5f;                        // of the scores' RMSNorm
  float output_norm_eps = 1e-5f;            // of the output's RMSNorm
  RowView<T> output{};                      // [M, H]
  Pdl pdl = Pdl::wait;                      // forward
  std::int32_t device = -1;                 // forward: CUDA ordinal, -1 for the current device
  PlanOverrides overrides{};                // forward
  // forward: whether a token's bits must not depend on its batch; none: LIBATTNRES_BATCH_INVARIANT
  std::optional<bool> batch_invariant{};
  // forward_host: 0 for LIBATTNRES_NUM_THREADS in the environment, else one per available core
  std::int32_t num_threads = 0;

  // The same call for the C interface. Throws where two arguments disagree on a size, which the C
  // struct could not express.
  attnres_forward_args c_args() const {
    const auto hidden_size = static_cast<std::int64_t>(norm_weight.size());
    require_same("qk_weight", "elements", hidden_size, static_cast<std::int64_t>(qk_weight.size()));
    if (!output_norm_weight.empty()) {
      require_same("output_norm_weight", "elements", hidden_size,
                   static_cast<std::int64_t>(output_norm_weight.size()));
    }
    if (delta.data != nullptr) require_same("delta", "tokens", prefix.num_tokens, delta.num_tokens);
    require_same("out", "tokens", prefix.num_tokens, output.num_tokens);

    attnres_forward_args args{};
    args.struct_size = sizeof(args);
    args.num_tokens = prefix.num_tokens;
    args.num_bank_tokens = blocks.num_tokens;
    args.num_bank_rows = blocks.num_rows;
    args.hidden_size = hidden_size;
    args.num_blocks = num_blocks;
    args.block_write_idx = block_write_idx;
    args.prefix = prefix.data;
    args.delta = delta.data;
    args.blocks = blocks.data;
    args.norm_weight = norm_weight.data();
    args.qk_weight = qk_weight.data();
    args.output_norm_weight = output_norm_weight.empty() ? nullptr : output_norm_weight.data();
    args.output = output.data;
    args.prefix_stride = prefix.stride;
    args.delta_stride = delta.stride;
    args.blocks_token_stride = blocks.token_stride;
    args.blocks_row_stride = blocks.row_stride;
    args.output_stride = output.stride;
    args.eps = eps;
    args.output_norm_eps = output_norm_eps;
    args.dtype = element<T>::value;
    args.pdl = static_cast<std::int32_t>(pdl);
    args.device = device;
    args.kernel = overrides.kernel;
    args.rows_per_stage = overrides.rows_per_stage;
    args.ctas_per_sm = overrides.ctas_per_sm;
    args.cluster_size = overrides.cluster_size;
    args.rows_in_flight = overrides.rows_in_flight;
    args.num_threads = num_threads;
    if (batch_invariant) args.batch_invariant = *batch_invariant ? 1 : -1;
    return args;
  }
};

// The bank's share of S calls, the first of two phases. H is hidden_size, S the rows of norm_weights, T the tokens
// of blocks. Bank is the type of blocks, or float.
template <Element T, Element Bank = T>
  requires std::same_as<Bank, T> || std::same_as<Bank, float>
struct BankArgs {
  BankView<const T> blocks{};       // [T, R, H]
  std::int64_t hidden_size = 0;     // H
  RowView<const T> norm_weights{};  // [S, H]: a row for each call site
  RowView<const T> qk_weights{};    // [S, H]
  std::int32_t num_blocks = 0;      // bank rows read, 1..min(8, R)
  float eps = 1e-5f;                // of the scores' RMSNorm
  BankView<Bank> bank{};            // [S, T, H]: entries are call sites, their rows the tokens
  float* lse = nullptr;             // [S, T]
  std::int64_t lse_stride = 0;      // between call sites
  Pdl pdl = Pdl::wait;              // bank
  std::int32_t device = -1;         // bank: CUDA ordinal, -1 for the current device
  std::optional<bool> batch_invariant{};
  std::int32_t num_threads = 0;  // bank_host, as in ForwardArgs

  // The same call for the C interface. Throws where two arguments disagree on a size.
  attnres_bank_args c_args() const {
    const std::int64_t num_sites = norm_weights.num_tokens;
    require_same("qk_weights", "call sites", num_sites, qk_weights.num_tokens);
    require_same("bank", "call sites", num_sites, bank.num_tokens);
    require_same("bank", "tokens", blocks.num_tokens, bank.num_rows);
    if (num_sites > INT32_MAX) {
      throw Error(ATTNRES_INVALID_ARGUMENT, "norm_weights: expected at most 1024 call sites, got " +
                                                std::to_string(num_sites));
    }
    attnres_bank_args args{};
    args.struct_size = sizeof(args);
    args.num_bank_tokens = blocks.num_tokens;
    args.num_bank_rows = blocks.num_rows;
    args.hidden_size = hidden_size;
    args.num_blocks = num_blocks;
    args.num_sites = static_cast<std::int32_t>(num_sites);
    args.blocks = blocks.data;
    args.norm_weights = norm_weights.data;
    args.qk_weights = qk_weights.data;
    args.bank = bank.data;
    args.lse = lse;
    args.blocks_token_stride = blocks.token_stride;
    args.blocks_row_stride = blocks.row_stride;
    args.norm_weights_stride = norm_weights.stride;
    args.qk_weights_stride = qk_weights.stride;
    args.bank_site_stride = bank.token_stride;
    args.bank_token_stride = bank.row_stride;
    args.lse_stride = lse_stride;
    args.eps = eps;
    args.dtype = element<T>::value;
    args.float32_bank = std::same_as<Bank, T> ? 0 : 1;
    args.pdl = static_cast<std::int32_t>(pdl);
    args.device = device;
    args.num_threads = num_threads;
    if (batch_invariant) args.batch_invariant = *batch_invariant ? 1 : -1;
    return args;
  }
};

// One call from what bank() left for its call site, the second of two phases. H is the size of norm_weight, M
// and T are the tokens of prefix and bank.
template <Element T, Element Bank = T>
  requires std::same_as<Bank, T> || std::same_as<Bank, float>
struct MergeArgs {
  RowView<T> prefix{};                      // [M, H], updated in place when there is a delta
  RowView<const T> delta{};                 // [M, H]; without data: none
  RowView<const Bank> bank{};               // [T, H], of one call site
  std::span<const float> lse{};             // [T], of one call site
  std::span<const T> norm_weight{};         // [H]
  std::span<const T> qk_weight{};           // [H]
  std::span<const T> output_norm_weight{};  // [H]; empty: no output norm
  BankView<T> blocks{};                     // [T, R, H]; only for a write
  std::int32_t block_write_idx = -1;        // bank row that receives p, -1 for none
  float eps = 1e-5f;                        // of the scores' RMSNorm
  float output_norm_eps = 1e-5f;            // of the output's RMSNorm
  RowView<T> output{};                      // [M, H]
  Pdl pdl = Pdl::wait;                      // merge
  std::int32_t device = -1;                 // merge: CUDA ordinal, -1 for the current device
  PlanOverrides overrides{};                // merge
  std::optional<bool> batch_invariant{};
  std::int32_t num_threads = 0;  // merge_host, as in ForwardArgs

  // The same call for the C interface. Throws where two arguments disagree on a size.
  attnres_merge_args c_args() const {
    const auto hidden_size = static_cast<std::int64_t>(norm_weight.size());
    require_same("qk_weight", "elements", hidden_size, static_cast<std::int64_t>(qk_weight.size()));
    if (!output_norm_weight.empty()) {
      require_same("output_norm_weight", "elements", hidden_size,
                   static_cast<std::int64_t>(output_norm_weight.size()));
    }
    if (delta.data != nullptr) require_same("delta", "tokens", prefix.num_tokens, delta.num_tokens);
    require_same("out", "tokens", prefix.num_tokens, output.num_tokens);
    require_same("lse", "elements", bank.num_tokens, static_cast<std::int64_t>(lse.size()));
    if (block_write_idx != -1) require_same("blocks", "tokens", bank.num_tokens, blocks.num_tokens);
    attnres_merge_args args{};
    args.struct_size = sizeof(args);
    args.num_tokens = prefix.num_tokens;
    args.num_bank_tokens = bank.num_tokens;
    args.num_bank_rows = blocks.num_rows;
    args.hidden_size = hidden_size;
    args.block_write_idx = block_write_idx;
    args.float32_bank = std::same_as<Bank, T> ? 0 : 1;
    args.prefix = prefix.data;
    args.delta = delta.data;
    args.bank = bank.data;
    args.lse = lse.data();
    args.norm_weight = norm_weight.data();
    args.qk_weight = qk_weight.data();
    args.output_norm_weight = output_norm_weight.empty() ? nullptr : output_norm_weight.data();
    args.blocks = blocks.data;
    args.output = output.data;
    args.prefix_stride = prefix.stride;
    args.delta_stride = delta.stride;
    args.bank_stride = bank.stride;
    args.blocks_token_stride = blocks.token_stride;
    args.blocks_row_stride = blocks.row_stride;
    args.output_stride = output.stride;
    args.eps = eps;
    args.output_norm_eps = output_norm_eps;
    args.dtype = element<T>::value;
    args.pdl = static_cast<std::int32_t>(pdl);
    args.device = device;
    args.kernel = overrides.kernel;
    args.rows_per_stage = overrides.rows_per_stage;
    args.ctas_per_sm = overrides.ctas_per_sm;
    args.cluster_size = overrides.cluster_size;
    args.rows_in_flight = overrides.rows_in_flight;
    args.num_threads = num_threads;
    if (batch_invariant) args.batch_invariant = *batch_invariant ? 1 : -1;
    return args;
  }
};

// Turns a status of the C interface into an Error.
inline void throw_on_failure(attnres_status status) {
  if (status != ATTNRES_OK) throw Error(status, attnres_last_error_message());
}

// Runs the operator on `stream` (cudaStream_t; null is the legacy default stream) of args.device.
// Asynchronous; capturable into a CUDA graph after warmup(); never synchronises. Zero tokens: no
// launch.
template <Element T>
void forward(const ForwardArgs<T>& args, CUstream_st* stream = nullptr) {
  const attnres_forward_args c_args = args.c_args();
  throw_on_failure(attnres_forward(&c_args, stream));
}

// Runs the operator on the CPU; returns when the results are in memory.
template <Element T>
void forward_host(const ForwardArgs<T>& args) {
  const attnres_forward_args c_args = args.c_args();
  throw_on_failure(attnres_forward_host(&c_args));
}

// The two phases, as forward and forward_host run the operator.
template <Element T, Element Bank>
void bank(const BankArgs<T, Bank>& args, CUstream_st* stream = nullptr) {
  const attnres_bank_args c_args = args.c_args();
  throw_on_failure(attnres_bank(&c_args, stream));
}
template <Element T, Element Bank>
void merge(const MergeArgs<T, Bank>& args, CUstream_st* stream = nullptr) {
  const attnres_merge_args c_args = args.c_args();
  throw_on_failure(attnres_merge(&c_args, stream));
}
template <Element T, Element Bank>
void bank_host(const BankArgs<T, Bank>& args) {
  const attnres_bank_args c_args = args.c_args();
  throw_on_failure(attnres_bank_host(&c_args));
}
template <Element T, Element Bank>
void merge_host(const MergeArgs<T, Bank>& args) {
  const attnres_merge_args c_args = args.c_args();
  throw_on_failure(attnres_merge_host(&c_args));
}

// Judges a call as forward (on_device) or forward_host would, and does nothing else. Needs no GPU.
template <Element T>
void check(const ForwardArgs<T>& args, bool on_device) {
  const attnres_forward_args c_args = args.c_args();
  throw_on_failure(attnres_check(&c_args, on_device));
}

// Which kernel and launch forward() would use on args.device.
template <Element T>
attnres_plan_info plan(const ForwardArgs<T>& args) {
  const attnres_forward_args c_args = args.c_args();
  attnres_plan_info info{};
  info.struct_size = sizeof(info);
  throw_on_failure(attnres_plan(&c_args, &info));
  return info;
}

// The same for a GPU that need not be there.
template <Element T>
attnres_plan_info plan_for(const ForwardArgs<T>& args, std::int32_t compute_major,
                           std::int32_t compute_minor, std::int32_t num_sms) {
  const attnres_forward_args c_args = args.c_args();
  attnres_plan_info info{};
  info.struct_size = sizeof(info);
  throw_on_failure(attnres_plan_for(&c_args, compute_major, compute_minor, num_sms, &info));
  return info;
}

// What the library can do on a device (-1: the current one). Without a GPU the answer says why.
inline attnres_probe_info probe(std::int32_t device = -1) {
  attnres_probe_info info{};
  info.struct_size = sizeof(info);
  throw_on_failure(attnres_probe(device, &info));
  return info;
}

// Loads every kernel for a device (-1: the current one), so that a first forward() may be captured.
inline void warmup(std::int32_t device = -1) { throw_on_failure(attnres_warmup(device)); }

// The compiled kernels; empty in a build without CUDA.
inline std::vector<attnres_permutation> permutations() {
  std::vector<attnres_permutation> all(static_cast<std::size_t>(attnres_num_permutations()));
  for (std::size_t index = 0; index < all.size(); ++index) {
    all[index].struct_size = sizeof(attnres_permutation);
    throw_on_failure(attnres_get_permutation(static_cast<std::int32_t>(index), &all[index]));
  }
  return all;
}

// Version of the loaded library, such as "0.1.0".
inline std::string version() { return attnres_version_string(); }

}  // namespace attnres
