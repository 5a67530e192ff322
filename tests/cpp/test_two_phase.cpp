// SPDX-License-Identifier: Apache-2.0
// The operator in two phases on the host: both together against the float64 answer of one, through the C
// and the C++ interface; and every refusal that is not shared with the operator in one phase.
#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include "attnres/attnres.hpp"
#include "forward_case.hpp"
#include "test_runner.hpp"

using namespace forward_case;

namespace {

constexpr int64_t kSites = 3;  // all with the weights of the one call, through a stride of 0
constexpr int64_t kGap = 5;    // elements between the rows of the bank, and between those of lse

// Both phases of one ForwardCase, with a float32 bank.
template <typename T>
struct TwoPhases {
  explicit TwoPhases(ForwardCase& call)
      : call(call),
        h(call.shape.hidden_size),
        t(call.num_entries()),
        bank_row(h + kGap),
        lse_row(t + kGap),
        bank(kSites * t * bank_row, -7.0f),
        lse(kSites * lse_row, -7.0f) {}

  T* pointer(int index) { return static_cast<T*>(call.buffers[index].data()); }

  attnres::BankArgs<T, float> bank_args(int num_threads = 0) {
    const int64_t stride = call.row_stride(), rows = call.shape.num_bank_rows;
    return {.blocks = {pointer(kBlocks), t, rows, rows * stride, stride},
            .hidden_size = h,
            .norm_weights = {pointer(kNormWeight), kSites, 0},
            .qk_weights = {pointer(kQkWeight), kSites, 0},
            .num_blocks = call.shape.num_blocks,
            .eps = call.shape.eps,
            .bank = {bank.data(), kSites, t, t * bank_row, bank_row},
            .lse = lse.data(),
            .lse_stride = lse_row,
            .num_threads = num_threads};
  }

  attnres::MergeArgs<T, float> merge_args(int64_t site, int num_threads = 0) {
    const int64_t m = call.shape.num_tokens, stride = call.row_stride();
    const int64_t rows = call.shape.num_bank_rows;
    const auto size = static_cast<size_t>(h);
    return {
        .prefix = {pointer(kPrefix), m, stride},
        .delta = {pointer(kDelta), m, stride},
        .bank = {bank.data() + site * t * bank_row, t, bank_row},
        .lse = {lse.data() + site * lse_row, static_cast<size_t>(t)},
        .norm_weight = {pointer(kNormWeight), size},
        .qk_weight = {pointer(kQkWeight), size},
        .output_norm_weight = {pointer(kOutputNormWeight), call.shape.has_output_norm ? size : 0},
        .blocks = {pointer(kBlocks), t, rows, rows * stride, stride},
        .block_write_idx = call.shape.block_write_idx,
        .eps = call.shape.eps,
        .output_norm_eps = call.shape.output_norm_eps,
        .output = {pointer(kOutput), m, stride},
        .num_threads = num_threads};
  }

  // Whether nothing between the rows was written, and every site is the same.
  bool is_tidy() const {
    for (int64_t row = 0; row < kSites * t; ++row) {
      for (int64_t i = h; i < bank_row; ++i) {
        if (bank[row * bank_row + i] != -7.0f) return false;
      }
    }
    for (int64_t site = 0; site < kSites; ++site) {
      for (int64_t i = t; i < lse_row; ++i) {
        if (lse[site * lse_row + i] != -7.0f) return false;
      }
    }
    return std::equal(bank.begin(), bank.begin() + t * bank_row, bank.begin() + t * bank_row) &&
           std::equal(lse.begin(), lse.begin() + lse_row, lse.begin() + lse_row);
  }

  ForwardCase& call;
  int64_t h, t, bank_row, lse_row;
  std::vector<float> bank, lse;
};

template <typename T>
void expect_right(const Shape& shape, int num_threads = 0) {
  ForwardCase call(shape);
  const ForwardCase::Expected expected = call.expected();
  TwoPhases<T> phases(call);
  attnres::bank_host(phases.bank_args(num_threads));
  EXPECT(phases.is_tidy());
  attnres::merge_host(phases.merge_args(kSites - 1, num_threads));
  const std::string wrong = call.mismatch(expected);
  if (!wrong.empty()) test_runner::fail(__FILE__, __LINE__, name_of(shape) + ": " + wrong);
}

void expect_right_for_each_dtype(Shape shape) {
  shape.dtype = ATTNRES_BFLOAT16;
  expect_right<attnres::bfloat16>(shape);
  shape.dtype = ATTNRES_FLOAT16;
  expect_right<attnres::float16>(shape);
  shape.dtype = ATTNRES_FLOAT32;
  expect_right<float>(shape);
}

struct Call {
  Call() : memory({.hidden_size = 64, .block_write_idx = 4}), phases(memory) {
    bank = phases.bank_args().c_args();
    merge = phases.merge_args(0).c_args();
  }
  ForwardCase memory;
  TwoPhases<attnres::bfloat16> phases;
  attnres_bank_args bank;
  attnres_merge_args merge;
};

void expect_verdict(int line, attnres_status wanted, const std::string& message,
                    const std::function<attnres_status(Call&)>& judge) {
  Call call;
  const attnres_status status = judge(call);
  const std::string got = status == ATTNRES_OK ? "" : attnres_last_error_message();
  if (status == wanted && got == message) return;
  test_runner::fail(__FILE__, line,
                    "wanted " + std::string(attnres_status_name(wanted)) + " '" + message +
                        "', got " + attnres_status_name(status) + " '" + got + "'");
}

}  // namespace

#define BANK(wanted, on_device, change, message)             \
  expect_verdict(__LINE__, wanted, message, [](Call& call) { \
    [[maybe_unused]] attnres_bank_args& a = call.bank;       \
    change;                                                  \
    return attnres_check_bank(&a, on_device);                \
  })
#define MERGE(wanted, on_device, change, message)            \
  expect_verdict(__LINE__, wanted, message, [](Call& call) { \
    [[maybe_unused]] attnres_merge_args& a = call.merge;     \
    change;                                                  \
    return attnres_check_merge(&a, on_device);               \
  })
#define BANK_REFUSES(change, message) BANK(ATTNRES_INVALID_ARGUMENT, 0, change, message)
#define MERGE_REFUSES(change, message) MERGE(ATTNRES_INVALID_ARGUMENT, 0, change, message)

TEST_CASE(every_variant_matches_float64) {
  for (int32_t num_blocks = 1; num_blocks <= 8; ++num_blocks) {
    for (const bool has_delta : {false, true}) {
      for (const bool has_output_norm : {false, true}) {
        for (const int32_t write : {-1, num_blocks / 2, 8}) {
          expect_right_for_each_dtype({.num_bank_rows = 9,
                                       .hidden_size = 100,
                                       .num_blocks = num_blocks,
                                       .block_write_idx = write,
                                       .has_delta = has_delta,
                                       .has_output_norm = has_output_norm});
        }
      }
    }
  }
}

TEST_CASE(every_hidden_size_matches_float64) {
  for (int64_t h = 1; h <= 70; ++h) {
    expect_right_for_each_dtype({.hidden_size = h, .num_blocks = 3, .padding = h % 3});
  }
  expect_right_for_each_dtype({.num_tokens = 2, .hidden_size = 7168, .num_blocks = 8});
}

TEST_CASE(shared_bank_entries_and_threads_match_float64) {
  for (const int64_t b : {1, 2, 3, 6}) {
    expect_right<float>(
        {.num_tokens = 6, .prefixes_per_entry = b, .dtype = ATTNRES_FLOAT32, .padding = 2});
  }
  expect_right<attnres::bfloat16>(
      {.num_tokens = 48, .hidden_size = 1024, .num_blocks = 8, .block_write_idx = 2}, 3);
}

// The bank's row is minus the prefix, and the scores differ a little: what is left is a ten-thousandth of either.
TEST_CASE(rows_that_cancel_keep_their_accuracy) {
  ForwardCase call({.hidden_size = 512,
                    .num_blocks = 1,
                    .has_delta = false,
                    .eps = 0,
                    .output_norm_eps = 1e-20f});
  const int64_t stride = call.row_stride();
  for (int64_t m = 0; m < call.shape.num_tokens; ++m) {
    for (int64_t i = 0; i < stride; ++i) {
      call.buffers[kBlocks].set(m * call.shape.num_bank_rows * stride + i,
                                -call.buffers[kPrefix].get(m * stride + i));
    }
  }
  for (int64_t i = 0; i < stride; ++i) {
    call.buffers[kQkWeight].set(i, 4e-6 * call.buffers[kQkWeight].get(i));
  }
  const ForwardCase::Expected expected = call.expected();
  TwoPhases<attnres::bfloat16> phases(call);
  attnres::bank_host(phases.bank_args());
  attnres::merge_host(phases.merge_args(0));
  EXPECT_EQ(call.mismatch(expected), std::string());
}

TEST_CASE(bits_do_not_depend_on_the_threads) {
  std::vector<std::vector<unsigned char>> bytes;
  std::vector<std::vector<float>> banks;
  for (const int threads : {1, 2, 5}) {
    ForwardCase call({.num_tokens = 48, .hidden_size = 1024, .num_blocks = 8});
    TwoPhases<attnres::bfloat16> phases(call);
    attnres::bank_host(phases.bank_args(threads));
    attnres::merge_host(phases.merge_args(0, threads));
    bytes.push_back(call.buffers[kOutput].bytes);
    banks.push_back(phases.bank);
  }
  EXPECT(bytes[0] == bytes[1] && bytes[0] == bytes[2]);
  EXPECT(banks[0] == banks[1] && banks[0] == banks[2]);
}

TEST_CASE(good_calls_are_accepted) {
  for (const int on_device : {0, 1}) {
    Call call;
    call.bank.bank_token_stride = call.bank.bank_site_stride / 3 - 1;  // 68 floats: 16 bytes apart
    call.bank.bank_site_stride = 3 * 68;
    EXPECT_EQ(attnres_check_bank(&call.bank, on_device), ATTNRES_OK);
    call.merge.bank_stride = 68;
    EXPECT_EQ(attnres_check_merge(&call.merge, on_device), ATTNRES_OK);
    call.merge.block_write_idx = -1;
    call.merge.num_bank_rows = -5;  // no part of a call without a write
    call.merge.blocks = nullptr;
    EXPECT_EQ(attnres_check_merge(&call.merge, on_device), ATTNRES_OK);
    call.merge.num_tokens = call.merge.num_bank_tokens = call.bank.num_bank_tokens = 0;
    call.merge.bank = call.bank.bank = nullptr;
    EXPECT_EQ(attnres_merge_host(&call.merge), ATTNRES_OK);
    EXPECT_EQ(attnres_bank_host(&call.bank), ATTNRES_OK);
  }
}

TEST_CASE(refusals_of_the_bank) {
  BANK_REFUSES(a.num_blocks = 0, "num_blocks: expected 1..8, got 0");
  BANK_REFUSES(a.num_bank_rows = 3, "num_blocks: expected 1..3, got 4");
  BANK_REFUSES(a.num_bank_rows = 0, "num_bank_rows: expected >= 1, got 0");
  BANK_REFUSES(a.num_sites = 0, "num_sites: expected 1..1024, got 0");
  BANK_REFUSES(a.num_sites = 1025, "num_sites: expected 1..1024, got 1025");
  BANK_REFUSES(a.float32_bank = 2, "float32_bank: expected 0..1, got 2");
  BANK_REFUSES(a.eps = -1, "eps: expected a finite number >= 0, got -1.000000");
  BANK_REFUSES(a.lse = nullptr, "lse: expected a pointer, got NULL");
  BANK_REFUSES(a.lse = reinterpret_cast<float*>(reinterpret_cast<char*>(a.lse) + 2),
               "lse: expected an address that is a multiple of its element size, 4 bytes, got one "
               "that is not");
  BANK_REFUSES(a.lse_stride = 2,
               "lse: expected a site stride >= num_bank_tokens (3) because it is written, got 2");
  BANK_REFUSES(a.bank_token_stride = 63,
               "bank: expected a token stride >= hidden_size (64) because it is written, got 63");
  BANK_REFUSES(a.bank_site_stride = 69,
               "bank: expected rows that share no byte because one of them is written, got site "
               "stride 69 and token stride 69 with hidden_size 64");
  BANK_REFUSES(a.norm_weights_stride = -1, "norm_weights: expected a site stride >= 0, got -1");
  BANK_REFUSES(a.bank = const_cast<void*>(a.blocks),
               "bank: expected memory that shares no byte with blocks, got overlapping memory");
  BANK_REFUSES(a.lse = static_cast<float*>(a.bank),
               "bank: expected memory that shares no byte with lse, got overlapping memory");
  BANK_REFUSES(a.lse = static_cast<float*>(const_cast<void*>(a.blocks)),
               "lse: expected memory that shares no byte with blocks, got overlapping memory");
  BANK(ATTNRES_UNSUPPORTED, 1, a.bank_token_stride = 65,
       "bank: expected strides that are multiples of 16 bytes for the native kernels, got 828 "
       "bytes");
}

TEST_CASE(refusals_of_the_merge) {
  MERGE_REFUSES(a.num_tokens = 4, "num_tokens: expected a multiple of num_bank_tokens (3), got 4");
  MERGE_REFUSES(a.block_write_idx = 8, "block_write_idx: expected -1..7, got 8");
  MERGE_REFUSES(a.num_bank_tokens = 1,
                "block_write_idx: expected -1 when 3 tokens share a bank entry, got 4");
  MERGE_REFUSES(a.blocks = nullptr, "blocks: expected a pointer, got NULL");
  MERGE_REFUSES(a.bank = nullptr, "bank: expected a pointer, got NULL");
  MERGE_REFUSES(a.bank_stride = -1, "bank: expected a token stride >= 0, got -1");
  MERGE_REFUSES(a.output = a.prefix,
                "out: expected memory that shares no byte with prefix, got overlapping memory");
  MERGE_REFUSES(a.lse = static_cast<const float*>(a.output),
                "out: expected memory that shares no byte with lse, got overlapping memory");
  // Of float32, so that more than one row would reach beyond the prefix.
  MERGE_REFUSES((a.bank = a.prefix, a.bank_stride = 0),
                "prefix: expected memory that shares no byte with bank, got overlapping memory");
  MERGE(ATTNRES_INVALID_ARGUMENT, 1, a.kernel = 3, "kernel: expected 0..2, got 3");
}

TEST_CASE(structs_of_other_sizes) {
  Call call;
  call.merge.struct_size = offsetof(attnres_merge_args, batch_invariant);
  EXPECT_EQ(attnres_check_merge(&call.merge, 0), ATTNRES_OK);
  call.bank.struct_size = offsetof(attnres_bank_args, eps);
  EXPECT_EQ(attnres_check_bank(&call.bank, 0), ATTNRES_OK);
  call.bank.struct_size = 8;
  EXPECT_EQ(attnres_bank_host(&call.bank), ATTNRES_INVALID_ARGUMENT);
  EXPECT_EQ(attnres_bank_host(nullptr), ATTNRES_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(attnres_last_error_message()), "args: expected a pointer, got NULL");
}
