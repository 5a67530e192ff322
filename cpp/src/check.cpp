// SPDX-License-Identifier: Apache-2.0
// The one place where a call's arguments are judged. The path of a good call allocates nothing.
#include "check.hpp"

#include <cfloat>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "error.hpp"
#include "overlap.hpp"

namespace attnres {
namespace {

constexpr int32_t kMaxNumBlocks = 8;
constexpr int32_t kMaxClusterSize = 16;
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

// One array argument: what the caller said of it, in elements, and the bytes it spans.
struct Argument {
  const char* name;
  const void* pointer;  // null: not there
  bool written;
  int64_t count[2];
  int64_t stride[2];
  uintptr_t begin = 0;
  uintptr_t end = 0;

  // A stride that is never multiplied by anything but 0 says nothing about memory.
  int64_t effective_stride(int dimension) const {
    return count[dimension] > 1 ? stride[dimension] : 0;
  }
};

Region region_of(const Argument& argument, int64_t hidden_size, int64_t element_size) {
  return {
      argument.begin,
      argument.end,
      {argument.count[0], argument.count[1]},
      {argument.effective_stride(0) * element_size, argument.effective_stride(1) * element_size},
      hidden_size * element_size};
}

void require_stride(const Argument& argument, int dimension, const char* which,
                    int64_t hidden_size) {
  const int64_t stride = argument.stride[dimension];
  if (stride < 0) [[unlikely]] {
    refuse(argument.name, std::string(which) + " stride >= 0", std::to_string(stride));
  }
  if (argument.written && argument.count[dimension] > 1 && stride < hidden_size) [[unlikely]] {
    refuse(argument.name,
           std::string(which) + " stride >= hidden_size (" + std::to_string(hidden_size) +
               ") because it is written",
           std::to_string(stride));
  }
}

// Judges the pointer and the strides, and fills in the span; refuses one that 64-bit addresses cannot
// hold.
void locate(Argument& argument, int64_t hidden_size, int64_t element_size) {
  if (argument.pointer == nullptr) [[unlikely]] {
    refuse(argument.name, "a pointer", "NULL");
  }
  argument.begin = reinterpret_cast<uintptr_t>(argument.pointer);
  if ((argument.begin & static_cast<uintptr_t>(element_size - 1)) != 0) [[unlikely]] {
    refuse(argument.name,
           "an address that is a multiple of its element size, " + std::to_string(element_size) +
               " bytes",
           "one that is not");
  }
  require_stride(argument, 0, "a token", hidden_size);
  require_stride(argument, 1, "a row", hidden_size);
  int64_t reach[2];
  int64_t length = 0;
  const bool overflows =
      __builtin_mul_overflow(argument.count[0] - 1, argument.effective_stride(0), &reach[0]) ||
      __builtin_mul_overflow(argument.count[1] - 1, argument.effective_stride(1), &reach[1]) ||
      __builtin_add_overflow(reach[0], reach[1], &length) ||
      __builtin_add_overflow(length, hidden_size, &length) ||
      __builtin_mul_overflow(length, element_size, &length) ||
      __builtin_add_overflow(argument.begin, static_cast<uintptr_t>(length), &argument.end) ||
      argument.end > static_cast<uintptr_t>(INT64_MAX);
  if (overflows) [[unlikely]] {
    refuse(argument.name, "an extent that fits in 63-bit byte addresses",
           "sizes and strides that pass it");
  }
}

void require_native_alignment(const Argument& argument, int64_t element_size) {
  const uintptr_t remainder = argument.begin % kDeviceAlignment;
  if (remainder != 0) [[unlikely]] {
    refuse_native(argument.name, "an address that is a multiple of 16 bytes",
                  "one that is " + std::to_string(remainder) + " bytes past a multiple");
  }
  for (const int dimension : {0, 1}) {
    const uint64_t stride =
        static_cast<uint64_t>(argument.effective_stride(dimension) * element_size);
    if (stride % kDeviceAlignment != 0) [[unlikely]] {
      refuse_native(argument.name, "strides that are multiples of 16 bytes",
                    std::to_string(stride) + " bytes");
    }
  }
}

void check_sizes(const attnres_forward_args& args) {
  require_at_least("num_tokens", args.num_tokens, 0);
  require_at_least("num_bank_tokens", args.num_bank_tokens, 0);
  require_at_least("num_bank_rows", args.num_bank_rows, 0);
  require_at_least("hidden_size", args.hidden_size, 1);
  const int64_t m = args.num_tokens;
  const int64_t t = args.num_bank_tokens;
  if (m != t && (t == 0 || m % t != 0)) [[unlikely]] {
    refuse("num_tokens", "a multiple of num_bank_tokens (" + std::to_string(t) + ")",
           std::to_string(m));
  }
  const int64_t rows = args.num_bank_rows;
  require_range("num_blocks", args.num_blocks, 0, rows < kMaxNumBlocks ? rows : kMaxNumBlocks);
  require_range("block_write_idx", args.block_write_idx, -1, rows - 1);
  if (args.block_write_idx >= 0 && m > t) [[unlikely]] {
    refuse("block_write_idx", "-1 when " + std::to_string(m / t) + " tokens share a bank entry",
           std::to_string(args.block_write_idx));
  }
}

void check_options(const attnres_forward_args& args, bool on_device) {
  require_epsilon("eps", args.eps);
  require_epsilon("output_norm_eps", args.output_norm_eps);
  require_range("batch_invariant", args.batch_invariant, -1, 1);
  if (args.dtype < ATTNRES_BFLOAT16 || args.dtype > ATTNRES_FLOAT32) [[unlikely]] {
    refuse("dtype", "0 (bfloat16), 1 (float16) or 2 (float32)", std::to_string(args.dtype));
  }
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
  const int64_t hidden_size = args.hidden_size;
  const int64_t element_size = args.dtype == ATTNRES_FLOAT32 ? 4 : 2;
  const int64_t tokens = args.num_tokens;
  const bool writes_bank = args.block_write_idx >= 0;
  const bool uses_bank = writes_bank || args.num_blocks > 0;
  const bool has_bank = args.num_bank_rows > 0;

  // Written arguments come first. `out` is the first of all: it is the one to change when it shares
  // memory with another.
  Argument list[] = {
      {"out", args.output, true, {tokens, 1}, {args.output_stride, 0}},
      {"prefix", args.prefix, args.delta != nullptr, {tokens, 1}, {args.prefix_stride, 0}},
      {"blocks",
       args.blocks,
       writes_bank,
       {args.num_bank_tokens, args.num_bank_rows},
       {args.blocks_token_stride, args.blocks_row_stride}},
      {"delta", args.delta, false, {tokens, 1}, {args.delta_stride, 0}},
      {"norm_weight", args.norm_weight, false, {1, 1}, {0, 0}},
      {"qk_weight", args.qk_weight, false, {1, 1}, {0, 0}},
      {"output_norm_weight", args.output_norm_weight, false, {1, 1}, {0, 0}},
  };
  constexpr int kCount = std::size(list);
  constexpr int kMaybeWritten = 3;
  Argument& blocks = list[2];

  for (Argument& argument : list) {
    const bool optional = &argument == &list[3] || &argument == &list[6];
    if (optional && argument.pointer == nullptr) continue;
    if (&argument == &blocks && !has_bank) continue;
    locate(argument, hidden_size, element_size);
  }
  if (writes_bank && overlaps_itself(region_of(blocks, hidden_size, element_size))) [[unlikely]] {
    refuse("blocks", "rows that share no byte because one of them is written",
           "token stride " + std::to_string(args.blocks_token_stride) + " and row stride " +
               std::to_string(args.blocks_row_stride) + " with hidden_size " +
               std::to_string(hidden_size));
  }

  for (int first = 0; first < kMaybeWritten; ++first) {
    const Argument& a = list[first];
    for (int second = first + 1; second < kCount; ++second) {
      const Argument& b = list[second];
      // What is absent spans [0, 0) and meets nothing.
      if (a.end <= b.begin || b.end <= a.begin) [[likely]] {
        continue;
      }
      if (!a.written && !b.written) continue;
      if (overlap(region_of(a, hidden_size, element_size), region_of(b, hidden_size, element_size)))
          [[unlikely]] {
        refuse(a.name, std::string("memory that shares no byte with ") + b.name,
               "overlapping memory");
      }
    }
  }

  if (!on_device) return;
  for (const Argument& argument : list) {
    if (argument.end == 0 || (&argument == &blocks && !uses_bank)) continue;
    require_native_alignment(argument, element_size);
  }
}

}  // namespace

void check(const attnres_forward_args& args, bool on_device) {
  check_sizes(args);
  check_options(args, on_device);
  // Without tokens nothing is read or written, so pointers and strides mean nothing.
  if (args.num_tokens > 0) check_memory(args, on_device);
  if (on_device && args.dtype != ATTNRES_BFLOAT16) [[unlikely]] {
    refuse_native("dtype", "bfloat16", dtype_name(args.dtype));
  }
}

}  // namespace attnres
