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

// One pointer argument and, once its strides were judged, the memory it covers.
struct Argument {
  const char* name;
  const void* pointer;
  bool written;
  Region region;
};

// A stride that is never multiplied by anything but 0 says nothing about memory.
int64_t effective_stride(int64_t count, int64_t stride) { return count > 1 ? stride : 0; }

void require_pointer(const Argument& argument, int64_t element_size) {
  if (argument.pointer == nullptr) [[unlikely]]
    refuse(argument.name, "a pointer", "NULL");
  if (reinterpret_cast<uintptr_t>(argument.pointer) & static_cast<uintptr_t>(element_size - 1))
      [[unlikely]] {
    refuse(argument.name,
           "an address that is a multiple of its element size, " + std::to_string(element_size) +
               " bytes",
           "one that is not");
  }
}

void require_stride(const Argument& argument, const char* which, int64_t count, int64_t stride,
                    int64_t hidden_size) {
  if (stride < 0) [[unlikely]] {
    refuse(argument.name, std::string(which) + " stride >= 0", std::to_string(stride));
  }
  if (argument.written && count > 1 && stride < hidden_size) [[unlikely]] {
    refuse(argument.name,
           std::string(which) + " stride >= hidden_size (" + std::to_string(hidden_size) +
               ") because it is written",
           std::to_string(stride));
  }
}

// Fills argument.region from counts and strides in elements; refuses what 64-bit addresses cannot
// hold.
void set_region(Argument& argument, int64_t count0, int64_t stride0, int64_t count1,
                int64_t stride1, int64_t hidden_size, int64_t element_size) {
  Region& region = argument.region;
  region.base = reinterpret_cast<uintptr_t>(argument.pointer);
  region.count[0] = count0;
  region.count[1] = count1;
  int64_t end = 0;
  int64_t reach0 = 0;
  int64_t reach1 = 0;
  uintptr_t last = 0;
  const bool overflows =
      __builtin_mul_overflow(effective_stride(count0, stride0), element_size, &region.stride[0]) ||
      __builtin_mul_overflow(effective_stride(count1, stride1), element_size, &region.stride[1]) ||
      __builtin_mul_overflow(hidden_size, element_size, &region.length) ||
      __builtin_mul_overflow(count0 - 1, region.stride[0], &reach0) ||
      __builtin_mul_overflow(count1 - 1, region.stride[1], &reach1) ||
      __builtin_add_overflow(reach0, reach1, &end) ||
      __builtin_add_overflow(end, region.length, &end) ||
      __builtin_add_overflow(region.base, static_cast<uintptr_t>(end), &last) ||
      last > static_cast<uintptr_t>(INT64_MAX);
  if (overflows) [[unlikely]] {
    refuse(argument.name, "an extent that fits in 63-bit byte addresses",
           "sizes and strides that pass it");
  }
  region.end = last;
}

void require_aligned_base(const Argument& argument) {
  const uintptr_t remainder = argument.region.base % kDeviceAlignment;
  if (remainder != 0) [[unlikely]] {
    refuse_native(argument.name, "an address that is a multiple of 16 bytes",
                  "one that is " + std::to_string(remainder) + " bytes past a multiple");
  }
}

void require_aligned_strides(const Argument& argument) {
  for (const int64_t stride : argument.region.stride) {
    if (static_cast<uint64_t>(stride) % kDeviceAlignment != 0) [[unlikely]] {
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
  } else {
    require_at_least("num_threads", args.num_threads, 0);
  }
}

enum Index { kPrefix, kDelta, kBlocks, kNormWeight, kQkWeight, kOutputNormWeight, kOutput, kCount };

void check_memory(const attnres_forward_args& args, bool on_device) {
  const bool writes_bank = args.block_write_idx >= 0;
  const bool uses_bank = writes_bank || args.num_blocks > 0;
  Argument list[kCount] = {
      {"prefix", args.prefix, args.delta != nullptr, {}},
      {"delta", args.delta, false, {}},
      {"blocks", args.blocks, writes_bank, {}},
      {"norm_weight", args.norm_weight, false, {}},
      {"qk_weight", args.qk_weight, false, {}},
      {"output_norm_weight", args.output_norm_weight, false, {}},
      {"out", args.output, true, {}},
  };
  const auto present = [&](int index) {
    if (index == kBlocks) return args.num_bank_rows > 0;
    if (index == kDelta || index == kOutputNormWeight) return list[index].pointer != nullptr;
    return true;
  };

  const int64_t element_size = args.dtype == ATTNRES_FLOAT32 ? 4 : 2;
  const int64_t token_strides[kCount] = {args.prefix_stride, args.delta_stride, 0, 0, 0, 0,
                                         args.output_stride};
  for (int index = 0; index < kCount; ++index) {
    if (!present(index)) continue;
    Argument& argument = list[index];
    require_pointer(argument, element_size);
    if (index == kBlocks) {
      const int64_t tokens = args.num_bank_tokens;
      const int64_t rows = args.num_bank_rows;
      require_stride(argument, "a token", tokens, args.blocks_token_stride, args.hidden_size);
      require_stride(argument, "a row", rows, args.blocks_row_stride, args.hidden_size);
      set_region(argument, tokens, args.blocks_token_stride, rows, args.blocks_row_stride,
                 args.hidden_size, element_size);
      if (writes_bank && overlaps_itself(argument.region)) [[unlikely]] {
        refuse(argument.name, "rows that share no byte because one of them is written",
               "token stride " + std::to_string(args.blocks_token_stride) + " and row stride " +
                   std::to_string(args.blocks_row_stride) + " with hidden_size " +
                   std::to_string(args.hidden_size));
      }
    } else {
      const bool per_token = index == kPrefix || index == kDelta || index == kOutput;
      const int64_t tokens = per_token ? args.num_tokens : 1;
      require_stride(argument, "a token", tokens, token_strides[index], args.hidden_size);
      set_region(argument, tokens, token_strides[index], 1, 0, args.hidden_size, element_size);
    }
  }

  for (int first = 0; first < kCount; ++first) {
    if (!list[first].written) continue;
    for (int second = 0; second < kCount; ++second) {
      // A pair of written arguments is judged once, from its first member.
      if (second == first || !present(second) || (list[second].written && second < first)) continue;
      if (overlap(list[first].region, list[second].region)) [[unlikely]] {
        // Where `out` is involved, it is the argument to change.
        const bool swap = second == kOutput;
        refuse(list[swap ? second : first].name,
               std::string("memory that shares no byte with ") + list[swap ? first : second].name,
               "overlapping memory");
      }
    }
  }

  if (!on_device) return;
  for (int index = 0; index < kCount; ++index) {
    if (!present(index) || (index == kBlocks && !uses_bank)) continue;
    require_aligned_base(list[index]);
    require_aligned_strides(list[index]);
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
