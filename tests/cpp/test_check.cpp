// SPDX-License-Identifier: Apache-2.0
// Every refusal of an argument: status, and "argument: expected ..., got ..." with the operator's
// names.
#include <cmath>
#include <functional>
#include <limits>

#include "forward_case.hpp"
#include "test_runner.hpp"

using namespace forward_case;

namespace {

constexpr int64_t kH = 64;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// A good call with everything in it: M = T = 3, R = 8, delta, output norm, write.
struct Call {
  Call() : memory({.hidden_size = kH, .block_write_idx = 4}), args(memory.args()) {}

  ForwardCase memory;
  attnres_forward_args args;
};

void* offset(const void* pointer, int64_t bytes) {
  return const_cast<unsigned char*>(static_cast<const unsigned char*>(pointer)) + bytes;
}

using Change = std::function<void(attnres_forward_args&)>;

void expect_verdict(const char* file, int line, attnres_status wanted, const std::string& message,
                    const Change& change, bool on_device) {
  Call call;
  change(call.args);
  const attnres_status status = attnres_check(&call.args, on_device);
  const std::string got = status == ATTNRES_OK ? "" : attnres_last_error_message();
  if (status == wanted && got == message) return;
  test_runner::fail(file, line,
                    "wanted " + std::string(attnres_status_name(wanted)) + " '" + message +
                        "', got " + attnres_status_name(status) + " '" + got + "'");
}

}  // namespace

#define ACCEPTS(change)                   \
  expect_verdict(                         \
      __FILE__, __LINE__, ATTNRES_OK, "", \
      [](attnres_forward_args& a) {       \
        change;                           \
        (void)a;                          \
      },                                  \
      false)
#define DEVICE_ACCEPTS(change)            \
  expect_verdict(                         \
      __FILE__, __LINE__, ATTNRES_OK, "", \
      [](attnres_forward_args& a) {       \
        change;                           \
        (void)a;                          \
      },                                  \
      true)
#define REFUSES(change, message)                             \
  expect_verdict(                                            \
      __FILE__, __LINE__, ATTNRES_INVALID_ARGUMENT, message, \
      [](attnres_forward_args& a) { change; }, false)
#define DEVICE_REFUSES(change, message)                      \
  expect_verdict(                                            \
      __FILE__, __LINE__, ATTNRES_INVALID_ARGUMENT, message, \
      [](attnres_forward_args& a) { change; }, true)
#define DEVICE_CANNOT(change, message)                                                           \
  expect_verdict(                                                                                \
      __FILE__, __LINE__, ATTNRES_UNSUPPORTED, message, [](attnres_forward_args& a) { change; }, \
      true)

TEST_CASE(good_calls_are_accepted) {
  ACCEPTS();
  DEVICE_ACCEPTS();
  ACCEPTS(a.delta = nullptr; a.output_norm_weight = nullptr; a.block_write_idx = -1);
  ACCEPTS(a.num_bank_rows = 0; a.num_blocks = 0; a.block_write_idx = -1; a.blocks = nullptr);
  ACCEPTS(a.num_tokens = a.num_bank_tokens = 0; a.prefix = a.output = a.blocks = nullptr);
  ACCEPTS(a.num_tokens = 0; a.prefix_stride = -5);  // without tokens, memory means nothing
  ACCEPTS(a.eps = 0; a.output_norm_eps = 0);
  ACCEPTS(a.dtype = ATTNRES_FLOAT16);
}

TEST_CASE(sizes) {
  REFUSES(a.num_tokens = -1, "num_tokens: expected >= 0, got -1");
  REFUSES(a.num_bank_tokens = -1, "num_bank_tokens: expected >= 0, got -1");
  REFUSES(a.num_bank_rows = -2, "num_bank_rows: expected >= 0, got -2");
  REFUSES(a.hidden_size = 0, "hidden_size: expected >= 1, got 0");
  REFUSES(a.num_tokens = 4, "num_tokens: expected a multiple of num_bank_tokens (3), got 4");
  REFUSES(a.num_bank_tokens = 0, "num_tokens: expected a multiple of num_bank_tokens (0), got 3");
}

TEST_CASE(bank_rows) {
  REFUSES(a.num_blocks = -1, "num_blocks: expected 0..8, got -1");
  REFUSES(a.num_blocks = 9, "num_blocks: expected 0..8, got 9");
  REFUSES(a.num_bank_rows = 3, "num_blocks: expected 0..3, got 4");
  REFUSES(a.block_write_idx = 8, "block_write_idx: expected -1..7, got 8");
  REFUSES(a.block_write_idx = -2, "block_write_idx: expected -1..7, got -2");
  REFUSES(a.num_bank_tokens = 1,
          "block_write_idx: expected -1 when 3 tokens share a bank entry, got 4");
  ACCEPTS(a.num_bank_tokens = 1; a.block_write_idx = -1);
}

TEST_CASE(numbers_and_options) {
  REFUSES(a.eps = -1, "eps: expected a finite number >= 0, got -1.000000");
  REFUSES(a.eps = NAN, "eps: expected a finite number >= 0, got nan");
  REFUSES(a.output_norm_eps = INFINITY, "output_norm_eps: expected a finite number >= 0, got inf");
  REFUSES(a.dtype = 3, "dtype: expected 0 (bfloat16), 1 (float16) or 2 (float32), got 3");
  REFUSES(a.num_threads = -1, "num_threads: expected >= 0, got -1");
  DEVICE_REFUSES(a.pdl = 3, "pdl: expected 0..2, got 3");
  DEVICE_REFUSES(a.device = -2, "device: expected >= -1, got -2");
  DEVICE_REFUSES(a.kernel = 3, "kernel: expected 0..2, got 3");
  DEVICE_REFUSES(a.rows_per_stage = 4, "rows_per_stage: expected 0..3, got 4");
  DEVICE_REFUSES(a.ctas_per_sm = 3, "ctas_per_sm: expected 0..2, got 3");
  DEVICE_REFUSES(a.cluster_size = -1, "cluster_size: expected 0..16, got -1");
  ACCEPTS(a.pdl = 3; a.kernel = 3; a.device = -2);  // what the host does not use it does not judge
}

TEST_CASE(pointers) {
  REFUSES(a.prefix = nullptr, "prefix: expected a pointer, got NULL");
  REFUSES(a.blocks = nullptr, "blocks: expected a pointer, got NULL");
  REFUSES(a.norm_weight = nullptr, "norm_weight: expected a pointer, got NULL");
  REFUSES(a.qk_weight = nullptr, "qk_weight: expected a pointer, got NULL");
  REFUSES(a.output = nullptr, "out: expected a pointer, got NULL");
  REFUSES(
      a.delta = offset(a.delta, 1),
      "delta: expected an address that is a multiple of its element size, 2 bytes, got one that is "
      "not");
}

TEST_CASE(strides) {
  REFUSES(a.prefix_stride = -1, "prefix: expected a token stride >= 0, got -1");
  REFUSES(a.delta_stride = -1, "delta: expected a token stride >= 0, got -1");
  REFUSES(a.blocks_row_stride = -1, "blocks: expected a row stride >= 0, got -1");
  REFUSES(a.prefix_stride = 63,
          "prefix: expected a token stride >= hidden_size (64) because it is written, got 63");
  REFUSES(a.output_stride = 0,
          "out: expected a token stride >= hidden_size (64) because it is written, got 0");
  REFUSES(a.blocks_row_stride = 32,
          "blocks: expected a row stride >= hidden_size (64) because it is written, got 32");
  REFUSES(
      a.blocks_token_stride = 7 * kH,  // row 7 of one entry is row 0 of the next
      "blocks: expected rows that share no byte because one of them is written, got token stride "
      "448 and row stride 64 with hidden_size 64");
  // Read-only arguments may repeat, a single token has no stride, and rows may lie outside of
  // tokens.
  ACCEPTS(a.delta_stride = 0);
  ACCEPTS(a.block_write_idx = -1; a.blocks_token_stride = 0; a.blocks_row_stride = 1);
  ACCEPTS(a.num_tokens = a.num_bank_tokens = 1; a.prefix_stride = 0; a.output_stride = 1);
  ACCEPTS(a.blocks_token_stride = kH; a.blocks_row_stride = 3 * kH);
}

TEST_CASE(extents_that_pass_the_address_space) {
  const char* const kGot =
      ": expected an extent that fits in 63-bit byte addresses, got sizes and "
      "strides that pass it";
  expect_verdict(
      __FILE__, __LINE__, ATTNRES_INVALID_ARGUMENT, std::string("out") + kGot,
      [](attnres_forward_args& a) { a.output_stride = kHuge; }, false);
  expect_verdict(
      __FILE__, __LINE__, ATTNRES_INVALID_ARGUMENT, std::string("blocks") + kGot,
      [](attnres_forward_args& a) { a.blocks_token_stride = kHuge / 4; }, false);
  expect_verdict(
      __FILE__, __LINE__, ATTNRES_INVALID_ARGUMENT, std::string("out") + kGot,
      [](attnres_forward_args& a) { a.hidden_size = a.output_stride = kHuge / 2; }, false);
  expect_verdict(
      __FILE__, __LINE__, ATTNRES_INVALID_ARGUMENT, std::string("out") + kGot,
      [](attnres_forward_args& a) { a.num_tokens = a.num_bank_tokens = kHuge; }, false);
}

TEST_CASE(memory_shared_with_a_written_argument) {
  REFUSES(a.output = a.prefix,
          "out: expected memory that shares no byte with prefix, got overlapping memory");
  // The very last element of the one token. What follows is delta's own memory, not another argument's.
  REFUSES(a.num_tokens = a.num_bank_tokens = 1;
          a.output = offset(a.delta, 2 * kH - 2),
          "out: expected memory that shares no byte with delta, got overlapping memory");
  REFUSES(a.qk_weight = a.output,
          "out: expected memory that shares no byte with qk_weight, got overlapping memory");
  REFUSES(a.delta = a.prefix,
          "prefix: expected memory that shares no byte with delta, got overlapping memory");
  REFUSES(a.prefix = offset(a.blocks, 2 * kH),
          "prefix: expected memory that shares no byte with blocks, got overlapping memory");
  REFUSES(a.norm_weight = a.blocks,
          "blocks: expected memory that shares no byte with norm_weight, got overlapping memory");
  REFUSES(a.output_norm_weight = a.prefix,
          "prefix: expected memory that shares no byte with output_norm_weight, got overlapping "
          "memory");
  // What is only read may be shared: weights, and prefix without a delta.
  ACCEPTS(a.norm_weight = a.qk_weight; a.output_norm_weight = a.qk_weight);
  ACCEPTS(a.delta = nullptr; a.block_write_idx = -1; a.prefix = a.blocks);
}

TEST_CASE(interleaved_views_of_one_allocation_are_separate) {
  // s is [T, 9, H]: blocks = s[:, :8], prefix = s[:, 8].
  ForwardCase s({.num_tokens = 5, .num_bank_rows = 9, .hidden_size = kH});
  Call call;
  attnres_forward_args& a = call.args;
  a.num_tokens = a.num_bank_tokens = 3;
  a.blocks = s.buffers[kBlocks].data();
  a.blocks_token_stride = a.prefix_stride = 9 * kH;
  a.prefix = offset(a.blocks, 2 * 8 * kH);
  EXPECT_EQ(attnres_check(&a, 1), ATTNRES_OK);
  // One element earlier, and one later: into row 7, or into row 0 of the next token.
  for (const int64_t shift : {-2, 2}) {
    a.prefix = offset(a.blocks, 2 * 8 * kH + shift);
    EXPECT_EQ(attnres_check(&a, 0), ATTNRES_INVALID_ARGUMENT);
  }
  // With a single token there is no next one.
  a.num_tokens = a.num_bank_tokens = 1;
  EXPECT_EQ(attnres_check(&a, 0), ATTNRES_OK);
}

TEST_CASE(what_only_the_native_kernels_require) {
  DEVICE_CANNOT(a.dtype = ATTNRES_FLOAT16,
                "dtype: expected bfloat16 for the native kernels, got float16");
  DEVICE_CANNOT(
      a.num_tokens = a.num_bank_tokens = 2;
      a.prefix = offset(a.prefix, 2),
      "prefix: expected an address that is a multiple of 16 bytes for the native kernels, got "
      "one that is 2 bytes past a multiple");
  DEVICE_CANNOT(
      a.norm_weight = offset(a.norm_weight, 8);
      a.hidden_size = 32,
      "norm_weight: expected an address that is a multiple of 16 bytes for the native kernels, "
      "got one that is 8 bytes past a multiple");
  DEVICE_CANNOT(
      a.hidden_size = 56;
      a.delta_stride = 60,
      "delta: expected strides that are multiples of 16 bytes for the native kernels, got 120 "
      "bytes");
  // A bank that is not used may lie anywhere.
  DEVICE_ACCEPTS(a.num_blocks = 0; a.block_write_idx = -1; a.blocks_row_stride = 3);
  // An error that every backend would refuse comes first.
  DEVICE_REFUSES(a.dtype = ATTNRES_FLOAT16;
                 a.eps = -1, "eps: expected a finite number >= 0, got -1.000000");
}

TEST_CASE(a_refused_call_has_written_nothing) {
  Call call;
  call.args.output = offset(call.args.blocks, 0);
  const ForwardCase before = call.memory;
  EXPECT_EQ(attnres_forward_host(&call.args), ATTNRES_INVALID_ARGUMENT);
  EXPECT_EQ(attnres_forward(&call.args, nullptr), ATTNRES_INVALID_ARGUMENT);
  for (int i = 0; i < kCount; ++i) EXPECT(call.memory.buffers[i].bytes == before.buffers[i].bytes);
}
