// SPDX-License-Identifier: Apache-2.0
// The one place where a call's arguments are judged. The path of a good call allocates nothing.
#include "check.hpp"

#include <cfloat>
#include <cstdint>
#include <string>
#include <string_view>

#include "error.hpp"
#include "overlap.hpp"

namespace attnres {
namespace {

constexpr int32_t kMaxNumBlocks = 8;
constexpr int32_t kMaxClusterSize = 16;
constexpr int32_t kMaxNumSites = 1024;
constexpr uintptr_t kDeviceAlignment = 16;

[[noreturn, gnu::cold, gnu::noinline]] void refuse(std::string_view name,
                                                   const std::string& expected,
                                                   const std::string& got) {
  fail(ATTNRES_INVALID_ARGUMENT, std::string(name) + ": expected " + expected + ", got " + got);
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_native(std::string_view name,
                                                          const std::string& expected,
                                                          const std::string& got) {
  fail(ATTNRES_UNSUPPORTED,
       std::string(name) + ": expected " + expected + " for the native kernels, got " + got);
}

void require_range(std::string_view name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) [[unlikely]] {
    refuse(name, std::to_string(low) + ".." + std::to_string(high), std::to_string(value));
  }
}

void require_at_least(std::string_view name, int64_t value, int64_t low) {
  if (value < low) [[unlikely]] {
    refuse(name, ">= " + std::to_string(low), std::to_string(value));
  }
}

void require_epsilon(std::string_view name, float value) {
  // Written so that a NaN fails too.
  if (!(value >= 0.0f && value <= FLT_MAX)) [[unlikely]] {
    refuse(name, "a finite number >= 0", std::to_string(value));
  }
}

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case ATTNRES_BFLOAT16:
      return "bfloat16";
    case ATTNRES_FLOAT16:
      return "float16";
    default:
      return "float32";
  }
}

// How the dimensions of an argument before its last are called, and what the last one's length is.
struct Dimensions {
  const char* stride[2];
  const char* length;
};
constexpr Dimensions kTokenRow = {{"token", "row"}, "hidden_size"};
constexpr Dimensions kSiteToken = {{"site", "token"}, "hidden_size"};
constexpr Dimensions kSiteOfTokens = {{"site", "token"}, "num_bank_tokens"};

// One array argument: what the caller said of it, in elements, and the bytes it spans.
struct Argument {
  const char* name;
  const void* pointer;
  bool present;  // otherwise it spans [0, 0) and meets nothing
  bool written;
  bool needs_alignment;  // by the native kernels
  int64_t count[2];
  int64_t stride[2];
  int64_t length;  // elements in a row, side by side
  int64_t element_size;
  const Dimensions* dimensions = &kTokenRow;
  uintptr_t begin = 0;
  uintptr_t end = 0;

  // A stride that is never multiplied by anything but 0 says nothing about memory.
  int64_t effective_stride(int dimension) const {
    return count[dimension] > 1 ? stride[dimension] : 0;
  }
  Region region() const {
    return {begin,
            end,
            {count[0], count[1]},
            {effective_stride(0) * element_size, effective_stride(1) * element_size},
            length * element_size};
  }
};

void require_stride(const Argument& argument, int dimension) {
  const int64_t stride = argument.stride[dimension];
  if (stride < 0) [[unlikely]] {
    refuse(argument.name,
           std::string("a ") + argument.dimensions->stride[dimension] + " stride >= 0",
           std::to_string(stride));
  }
  if (argument.written && argument.count[dimension] > 1 && stride < argument.length) [[unlikely]] {
    refuse(argument.name,
           std::string("a ") + argument.dimensions->stride[dimension] +
               " stride >= " + argument.dimensions->length + " (" +
               std::to_string(argument.length) + ") because it is written",
           std::to_string(stride));
  }
}

// Judges the pointer and the strides, and fills in the span; refuses one that 64-bit addresses cannot
// hold.
void locate(Argument& argument) {
  if (argument.pointer == nullptr) [[unlikely]] {
    refuse(argument.name, "a pointer", "NULL");
  }
  argument.begin = reinterpret_cast<uintptr_t>(argument.pointer);
  if ((argument.begin & static_cast<uintptr_t>(argument.element_size - 1)) != 0) [[unlikely]] {
    refuse(argument.name,
           "an address that is a multiple of its element size, " +
               std::to_string(argument.element_size) + " bytes",
           "one that is not");
  }
  require_stride(argument, 0);
  require_stride(argument, 1);
  int64_t reach[2];
  int64_t length = 0;
  const bool overflows =
      __builtin_mul_overflow(argument.count[0] - 1, argument.effective_stride(0), &reach[0]) ||
      __builtin_mul_overflow(argument.count[1] - 1, argument.effective_stride(1), &reach[1]) ||
      __builtin_add_overflow(reach[0], reach[1], &length) ||
      __builtin_add_overflow(length, argument.length, &length) ||
      __builtin_mul_overflow(length, argument.element_size, &length) ||
      __builtin_add_overflow(argument.begin, static_cast<uintptr_t>(length), &argument.end) ||
      argument.end > static_cast<uintptr_t>(INT64_MAX);
  if (overflows) [[unlikely]] {
    refuse(argument.name, "an extent that fits in 63-bit byte addresses",
           "sizes and strides that pass it");
  }
}

void require_native_alignment(const Argument& argument) {
  const uintptr_t remainder = argument.begin % kDeviceAlignment;
  if (remainder != 0) [[unlikely]] {
    refuse_native(argument.name, "an address that is a multiple of 16 bytes",
                  "one that is " + std::to_string(remainder) + " bytes past a multiple");
  }
  for (const int dimension : {0, 1}) {
    const uint64_t stride =
        static_cast<uint64_t>(argument.effective_stride(dimension) * argument.element_size);
    if (stride % kDeviceAlignment != 0) [[unlikely]] {
      refuse_native(argument.name, "strides that are multiples of 16 bytes",
                    std::to_string(stride) + " bytes");
    }
  }
}

void require_separate_rows(const Argument& argument) {
  if (!overlaps_itself(argument.region())) return;
  const char* const* names = argument.dimensions->stride;
  refuse(argument.name, "rows that share no byte because one of them is written",
         std::string(names[0]) + " stride " + std::to_string(argument.stride[0]) + " and " +
             names[1] + " stride " + std::to_string(argument.stride[1]) + " with " +
             argument.dimensions->length + " " + std::to_string(argument.length));
}

// Those that may be written come first in the list, and the one to change when two share memory before the
// other.
template <int N>
void check_arguments(Argument (&list)[N], int maybe_written, bool on_device) {
  for (Argument& argument : list) {
    if (!argument.present) continue;
    locate(argument);
    if (argument.written && argument.count[1] > 1) require_separate_rows(argument);
  }
  for (int first = 0; first < maybe_written; ++first) {
    const Argument& a = list[first];
    for (int second = first + 1; second < N; ++second) {
      const Argument& b = list[second];
      if (a.end <= b.begin || b.end <= a.begin) [[likely]] {
        continue;
      }
      if (!a.written && !b.written) continue;
      if (overlap(a.region(), b.region())) [[unlikely]] {
        refuse(a.name, std::string("memory that shares no byte with ") + b.name,
               "overlapping memory");
      }
    }
  }
  if (!on_device) return;
  for (const Argument& argument : list) {
    if (argument.present && argument.needs_alignment) require_native_alignment(argument);
  }
}

// What several structs have in common. M tokens share T bank entries, of R rows each.
void check_tokens(int64_t m, int64_t t) {
  if (m != t && (t == 0 || m % t != 0)) [[unlikely]] {
    refuse("num_tokens", "a multiple of num_bank_tokens (" + std::to_string(t) + ")",
           std::to_string(m));
  }
}

void check_write(int32_t block_write_idx, int64_t rows, int64_t m, int64_t t) {
  require_range("block_write_idx", block_write_idx, -1, rows - 1);
  if (block_write_idx >= 0 && m > t) [[unlikely]] {
    refuse("block_write_idx", "-1 when " + std::to_string(m / t) + " tokens share a bank entry",
           std::to_string(block_write_idx));
  }
}

void check_dtype(int32_t dtype) {
  if (dtype < ATTNRES_BFLOAT16 || dtype > ATTNRES_FLOAT32) [[unlikely]] {
    refuse("dtype", "0 (bfloat16), 1 (float16) or 2 (float32)", std::to_string(dtype));
  }
}

void check_native_dtype(int32_t dtype) {
  if (dtype != ATTNRES_BFLOAT16) [[unlikely]] {
    refuse_native("dtype", "bfloat16", dtype_name(dtype));
  }
}

int64_t element_size_of(int32_t dtype) { return dtype == ATTNRES_FLOAT32 ? 4 : 2; }

void check_sizes(const attnres_forward_args& args) {
  require_at_least("num_tokens", args.num_tokens, 0);
  require_at_least("num_bank_tokens", args.num_bank_tokens, 0);
  require_at_least("num_bank_rows", args.num_bank_rows, 0);
  require_at_least("hidden_size", args.hidden_size, 1);
  check_tokens(args.num_tokens, args.num_bank_tokens);
  const int64_t rows = args.num_bank_rows;
  require_range("num_blocks", args.num_blocks, 0, rows < kMaxNumBlocks ? rows : kMaxNumBlocks);
  check_write(args.block_write_idx, rows, args.num_tokens, args.num_bank_tokens);
}

// Of one call, in one phase or two.
template <typename Args>
void check_options(const Args& args, bool on_device) {
  require_epsilon("eps", args.eps);
  require_epsilon("output_norm_eps", args.output_norm_eps);
  require_range("batch_invariant", args.batch_invariant, -1, 1);
  check_dtype(args.dtype);
  if (on_device) {
    require_range("pdl", args.pdl, ATTNRES_PDL_WAIT, ATTNRES_PDL_OFF);
    require_at_least("device", args.device, -1);
    require_range("kernel", args.kernel, ATTNRES_KERNEL_AUTO, ATTNRES_KERNEL_CLUSTER);
    require_range("rows_per_stage", args.rows_per_stage, 0, 3);
    require_range("ctas_per_sm", args.ctas_per_sm, 0, 2);
    require_range("cluster_size", args.cluster_size, 0, kMaxClusterSize);
    require_at_least("rows_in_flight", args.rows_in_flight, 0);
  } else {
    require_at_least("num_threads", args.num_threads, 0);
  }
}

void check_memory(const attnres_forward_args& args, bool on_device) {
  const int64_t h = args.hidden_size;
  const int64_t size = element_size_of(args.dtype);
  const int64_t tokens = args.num_tokens;
  const bool writes_bank = args.block_write_idx >= 0;
  const bool uses_bank = writes_bank || args.num_blocks > 0;
  const bool has_delta = args.delta != nullptr;
  const bool has_norm = args.output_norm_weight != nullptr;
  const int64_t entries = args.num_bank_tokens;
  const int64_t rows = args.num_bank_rows;
  const int64_t bank_strides[] = {args.blocks_token_stride, args.blocks_row_stride};

  Argument list[] = {
      {"out", args.output, true, true, true, {tokens, 1}, {args.output_stride, 0}, h, size},
      {"prefix", args.prefix, true, has_delta, true, {tokens, 1}, {args.prefix_stride, 0}, h, size},
      {"blocks",
       args.blocks,
       rows > 0,
       writes_bank,
       uses_bank,
       {entries, rows},
       {bank_strides[0], bank_strides[1]},
       h,
       size},
      {"delta", args.delta, has_delta, false, true, {tokens, 1}, {args.delta_stride, 0}, h, size},
      {"norm_weight", args.norm_weight, true, false, true, {1, 1}, {0, 0}, h, size},
      {"qk_weight", args.qk_weight, true, false, true, {1, 1}, {0, 0}, h, size},
      {"output_norm_weight",
       args.output_norm_weight,
       has_norm,
       false,
       true,
       {1, 1},
       {0, 0},
       h,
       size},
  };
  check_arguments(list, 3, on_device);
}

void check_memory(const attnres_bank_args& args, bool on_device) {
  const int64_t h = args.hidden_size;
  const int64_t t = args.num_bank_tokens;
  const int64_t s = args.num_sites;
  const int64_t size = element_size_of(args.dtype);
  Argument list[] = {
      {"bank",
       args.bank,
       true,
       true,
       true,
       {s, t},
       {args.bank_site_stride, args.bank_token_stride},
       h,
       args.float32_bank != 0 ? 4 : size,
       &kSiteToken},
      {"lse", args.lse, true, true, false, {s, 1}, {args.lse_stride, 0}, t, 4, &kSiteOfTokens},
      {"blocks",
       args.blocks,
       true,
       false,
       true,
       {t, args.num_bank_rows},
       {args.blocks_token_stride, args.blocks_row_stride},
       h,
       size},
      {"norm_weights",
       args.norm_weights,
       true,
       false,
       true,
       {s, 1},
       {args.norm_weights_stride, 0},
       h,
       size,
       &kSiteToken},
      {"qk_weights",
       args.qk_weights,
       true,
       false,
       true,
       {s, 1},
       {args.qk_weights_stride, 0},
       h,
       size,
       &kSiteToken},
  };
  check_arguments(list, 2, on_device);
}

void check_memory(const attnres_merge_args& args, bool on_device) {
  const int64_t h = args.hidden_size;
  const int64_t size = element_size_of(args.dtype);
  const int64_t tokens = args.num_tokens;
  const int64_t entries = args.num_bank_tokens;
  const bool has_delta = args.delta != nullptr;
  const bool has_norm = args.output_norm_weight != nullptr;
  const bool writes = args.block_write_idx >= 0;
  const int64_t bank_size = args.float32_bank != 0 ? 4 : size;
  Argument list[] = {
      {"out", args.output, true, true, true, {tokens, 1}, {args.output_stride, 0}, h, size},
      {"prefix", args.prefix, true, has_delta, true, {tokens, 1}, {args.prefix_stride, 0}, h, size},
      {"blocks",
       args.blocks,
       writes,
       writes,
       true,
       {entries, args.num_bank_rows},
       {args.blocks_token_stride, args.blocks_row_stride},
       h,
       size},
      {"delta", args.delta, has_delta, false, true, {tokens, 1}, {args.delta_stride, 0}, h, size},
      {"bank", args.bank, true, false, true, {entries, 1}, {args.bank_stride, 0}, h, bank_size},
      {"lse", args.lse, true, false, false, {1, 1}, {0, 0}, entries, 4},
      {"norm_weight", args.norm_weight, true, false, true, {1, 1}, {0, 0}, h, size},
      {"qk_weight", args.qk_weight, true, false, true, {1, 1}, {0, 0}, h, size},
      {"output_norm_weight",
       args.output_norm_weight,
       has_norm,
       false,
       true,
       {1, 1},
       {0, 0},
       h,
       size},
  };
  check_arguments(list, 3, on_device);
}

}  // namespace

void check(const attnres_forward_args& args, bool on_device) {
  check_sizes(args);
  check_options(args, on_device);
  // Without tokens nothing is read or written, so pointers and strides mean nothing.
  if (args.num_tokens > 0) check_memory(args, on_device);
  if (on_device) check_native_dtype(args.dtype);
}

void check_bank(const attnres_bank_args& args, bool on_device) {
  require_at_least("num_bank_tokens", args.num_bank_tokens, 0);
  require_at_least("num_bank_rows", args.num_bank_rows, 1);
  require_at_least("hidden_size", args.hidden_size, 1);
  const int64_t rows = args.num_bank_rows;
  require_range("num_blocks", args.num_blocks, 1, rows < kMaxNumBlocks ? rows : kMaxNumBlocks);
  require_range("num_sites", args.num_sites, 1, kMaxNumSites);
  require_epsilon("eps", args.eps);
  check_dtype(args.dtype);
  require_range("float32_bank", args.float32_bank, 0, 1);
  require_range("batch_invariant", args.batch_invariant, -1, 1);
  if (on_device) {
    require_range("pdl", args.pdl, ATTNRES_PDL_WAIT, ATTNRES_PDL_OFF);
    require_at_least("device", args.device, -1);
    require_at_least("num_clusters", args.num_clusters, 0);
  } else {
    require_at_least("num_threads", args.num_threads, 0);
  }
  if (args.num_bank_tokens > 0) check_memory(args, on_device);
  if (on_device) check_native_dtype(args.dtype);
}

void check_merge(const attnres_merge_args& args, bool on_device) {
  require_at_least("num_tokens", args.num_tokens, 0);
  require_at_least("num_bank_tokens", args.num_bank_tokens, 0);
  require_at_least("hidden_size", args.hidden_size, 1);
  check_tokens(args.num_tokens, args.num_bank_tokens);
  if (args.block_write_idx != -1) {
    require_at_least("num_bank_rows", args.num_bank_rows, 0);
    check_write(args.block_write_idx, args.num_bank_rows, args.num_tokens, args.num_bank_tokens);
  }
  require_range("float32_bank", args.float32_bank, 0, 1);
  check_options(args, on_device);
  if (args.num_tokens > 0) check_memory(args, on_device);
  if (on_device) check_native_dtype(args.dtype);
}

}  // namespace attnres
