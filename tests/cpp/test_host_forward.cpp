// SPDX-License-Identifier: Apache-2.0
// The host backend against float64, through the C interface.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "forward_case.hpp"
#include "test_runner.hpp"

using namespace forward_case;

namespace {

constexpr int32_t kDtypes[] = {ATTNRES_BFLOAT16, ATTNRES_FLOAT16, ATTNRES_FLOAT32};

attnres_status run(ForwardCase& call, int num_threads = 0) {
  attnres_forward_args args = call.args();
  args.num_threads = num_threads;
  return attnres_forward_host(&args);
}

void expect_right(const Shape& shape, int num_threads = 0) {
  ForwardCase call(shape);
  const ForwardCase::Expected expected = call.expected();
  if (run(call, num_threads) != ATTNRES_OK) {
    return test_runner::fail(__FILE__, __LINE__,
                             name_of(shape) + ": " + attnres_last_error_message());
  }
  const std::string wrong = call.mismatch(expected);
  if (!wrong.empty()) test_runner::fail(__FILE__, __LINE__, name_of(shape) + ": " + wrong);
}

std::vector<unsigned char> bytes_after(const ForwardCase& call, int num_threads) {
  ForwardCase copy = call;
  EXPECT_EQ(run(copy, num_threads), ATTNRES_OK);
  std::vector<unsigned char> all;
  for (const Buffer& buffer : copy.buffers) {
    all.insert(all.end(), buffer.bytes.begin(), buffer.bytes.end());
  }
  return all;
}

// Large enough that the backend hands tokens to helpers.
Shape threaded_shape() {
  return {.num_tokens = 48, .hidden_size = 1024, .num_blocks = 8, .block_write_idx = 2};
}

}  // namespace

TEST_CASE(every_variant_matches_float64) {
  for (const int32_t dtype : kDtypes) {
    for (int32_t num_blocks = 0; num_blocks <= 8; ++num_blocks) {
      for (const bool has_delta : {false, true}) {
        for (const bool has_output_norm : {false, true}) {
          // no write; over a row that is read, or the first that is not; beyond those that are read
          for (const int32_t write : {-1, num_blocks / 2, 8}) {
            expect_right({.num_bank_rows = 9,
                          .hidden_size = 200,
                          .num_blocks = num_blocks,
                          .block_write_idx = write,
                          .has_delta = has_delta,
                          .has_output_norm = has_output_norm,
                          .dtype = dtype});
          }
        }
      }
    }
  }
}

TEST_CASE(every_hidden_size_matches_float64) {
  // 1..70 cover every tail of every target's chunk (at most 32 elements); then whole chunks.
  for (const int32_t dtype : kDtypes) {
    for (int64_t h = 1; h <= 70; ++h) {
      expect_right({.hidden_size = h, .num_blocks = 3, .dtype = dtype, .padding = h % 3});
    }
    expect_right({.num_tokens = 2, .hidden_size = 7168, .num_blocks = 8, .dtype = dtype});
  }
}

TEST_CASE(padded_rows_and_shared_bank_entries_match_float64) {
  for (const int64_t b : {1, 2, 3, 6}) {  // 6: one bank entry for all tokens
    for (const int threads : {1, 3}) {
      expect_right({.num_tokens = 6,
                    .prefixes_per_entry = b,
                    .hidden_size = 8192,
                    .num_blocks = 8,
                    .padding = 24},
                   threads);
    }
  }
}

TEST_CASE(bank_may_be_absent_or_repeated) {
  Shape shape{.num_bank_rows = 0, .num_blocks = 0};
  ForwardCase none(shape);
  const ForwardCase::Expected expected = none.expected();
  attnres_forward_args args = none.args();
  args.blocks = nullptr;
  EXPECT_EQ(attnres_forward_host(&args), ATTNRES_OK);
  EXPECT_EQ(none.mismatch(expected), "");

  // A token stride of 0 gives every token the first bank entry, as B = M does.
  ForwardCase shared({.num_tokens = 4, .prefixes_per_entry = 4});
  ForwardCase repeated = shared;
  args = repeated.args();
  args.num_bank_tokens = 4;
  args.blocks_token_stride = 0;
  EXPECT_EQ(attnres_forward_host(&args), ATTNRES_OK);
  EXPECT_EQ(run(shared), ATTNRES_OK);
  EXPECT(shared.buffers[kOutput].bytes == repeated.buffers[kOutput].bytes);
}

TEST_CASE(zero_tokens_do_nothing) {
  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  args.hidden_size = 7168;
  EXPECT_EQ(attnres_forward_host(&args), ATTNRES_OK);
}

TEST_CASE(one_source_is_passed_through_bit_for_bit) {
  // Every 16-bit pattern, so every subnormal, infinity and NaN, through load and store.
  for (const int32_t dtype : {ATTNRES_BFLOAT16, ATTNRES_FLOAT16}) {
    ForwardCase call({.num_tokens = 1,
                      .hidden_size = 65536,
                      .num_blocks = 0,
                      .has_delta = false,
                      .has_output_norm = false,
                      .dtype = dtype});
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint16_t word = static_cast<uint16_t>(bits);
      std::memcpy(&call.buffers[kPrefix].bytes[2 * bits], &word, 2);
    }
    EXPECT_EQ(run(call), ATTNRES_OK);
    int wrong = 0;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const double in = call.buffers[kPrefix].get(bits);
      const double out = call.buffers[kOutput].get(bits);
      uint16_t word;
      std::memcpy(&word, &call.buffers[kOutput].bytes[2 * bits], 2);
      wrong += std::isnan(in) ? !std::isnan(out) : word != bits;
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST_CASE(prefix_update_is_rounded_once_for_any_bits) {
  for (const int32_t dtype : kDtypes) {
    ForwardCase call({.num_tokens = 1, .hidden_size = 100000, .num_blocks = 0, .dtype = dtype});
    std::mt19937 random(7);
    for (const int index : {kPrefix, kDelta}) {
      Buffer& buffer = call.buffers[index];
      for (unsigned char& byte : buffer.bytes) byte = static_cast<unsigned char>(random());
      for (int64_t i = 0; i < call.shape.hidden_size; ++i) {
        if (std::isnan(buffer.get(i))) buffer.set(i, 1.0);
        // Half of the sums between numbers of one magnitude: ties, cancellation, overflow.
        if (index == kDelta && i % 2 == 0) {
          buffer.set(i,
                     call.buffers[kPrefix].get(i) * (1.0 + (static_cast<int>(i) % 7 - 3) * 0x1p-7));
        }
      }
    }
    const ForwardCase::Expected expected = call.expected();
    EXPECT_EQ(run(call), ATTNRES_OK);
    int wrong = 0;
    for (int64_t i = 0; i < call.shape.hidden_size; ++i) {
      Buffer want;
      want.dtype = dtype;
      want.bytes = {expected.bytes[kPrefix].begin() + i * format_of(dtype).size,
                    expected.bytes[kPrefix].begin() + (i + 1) * format_of(dtype).size};
      const double got = call.buffers[kPrefix].get(i);
      wrong +=
          std::isnan(want.get(0))
              ? !std::isnan(got)
              : std::memcmp(want.data(), &call.buffers[kPrefix].bytes[i * format_of(dtype).size],
                            format_of(dtype).size) != 0;
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST_CASE(thread_counts_and_repeats_give_the_same_bits) {
  for (const int32_t dtype : kDtypes) {
    Shape shape = threaded_shape();
    shape.dtype = dtype;
    const ForwardCase call(shape);
    const std::vector<unsigned char> alone = bytes_after(call, 1);
    for (const int threads : {2, 3, 7, 48, 1000, 0}) EXPECT(bytes_after(call, threads) == alone);
  }
}

TEST_CASE(a_tokens_bits_do_not_depend_on_its_batch) {
  const ForwardCase batch(threaded_shape());
  ForwardCase all = batch, alone = batch;
  EXPECT_EQ(run(all), ATTNRES_OK);
  for (const int64_t m : {0, 17, 47}) {
    attnres_forward_args args = alone.args();
    const int64_t stride = alone.row_stride();
    args.num_tokens = args.num_bank_tokens = 1;
    args.prefix = static_cast<uint16_t*>(args.prefix) + m * stride;
    args.delta = static_cast<const uint16_t*>(args.delta) + m * stride;
    args.blocks = static_cast<uint16_t*>(args.blocks) + m * args.blocks_token_stride;
    args.output = static_cast<uint16_t*>(args.output) + m * stride;
    EXPECT_EQ(attnres_forward_host(&args), ATTNRES_OK);
    EXPECT(std::memcmp(args.output, &all.buffers[kOutput].bytes[m * stride * 2], stride * 2) == 0);
  }
}

TEST_CASE(nan_and_inf_stay_in_their_token) {
  const ForwardCase clean(threaded_shape());
  ForwardCase dirty = clean, untouched = clean;
  const int64_t h = dirty.shape.hidden_size;
  dirty.buffers[kPrefix].set(5 * h + 9, NAN);
  dirty.buffers[kDelta].set(11 * h, INFINITY);
  dirty.buffers[kBlocks].set((20 * 8 + 3) * h + 1000, -INFINITY);
  EXPECT_EQ(run(dirty), ATTNRES_OK);
  EXPECT_EQ(run(untouched), ATTNRES_OK);
  for (int64_t m = 0; m < dirty.shape.num_tokens; ++m) {
    const bool same = std::memcmp(&dirty.buffers[kOutput].bytes[m * h * 2],
                                  &untouched.buffers[kOutput].bytes[m * h * 2], h * 2) == 0;
    EXPECT_EQ(same, m != 5 && m != 11 && m != 20);
  }
  EXPECT(std::isnan(dirty.buffers[kOutput].get(5 * h)));
}

TEST_CASE(callers_float_environment_is_neither_used_nor_changed) {
  const ForwardCase call(threaded_shape());
  const std::vector<unsigned char> normal = bytes_after(call, 2);
  std::fesetround(FE_UPWARD);
  const bool same = bytes_after(call, 2) == normal;
  const int mode = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT(same);
  EXPECT_EQ(mode, FE_UPWARD);
}

TEST_CASE(concurrent_callers_get_their_own_results) {
  const ForwardCase call(threaded_shape());
  const std::vector<unsigned char> alone = bytes_after(call, 1);
  int wrong[4] = {};
  std::vector<std::thread> callers;
  for (int& count : wrong) {
    callers.emplace_back([&] {
      for (int i = 0; i < 20; ++i) count += bytes_after(call, 3) != alone;
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int count : wrong) EXPECT_EQ(count, 0);
}

#if !defined(__SANITIZE_THREAD__)  // which cannot follow a fork of several threads
TEST_CASE(a_forked_child_runs_with_threads_of_its_own) {
  const ForwardCase call(threaded_shape());
  const std::vector<unsigned char> parent = bytes_after(call, 3);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a hang ends here
    const bool same = bytes_after(call, 3) == parent && bytes_after(call, 3) == parent;
    _exit(same ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT(bytes_after(call, 3) == parent);
}
#endif

TEST_CASE(environment_names_the_thread_count) {
  ForwardCase call(threaded_shape());
  for (const char* bad : {"zero", "0", "-2", "3 threads", "99999999999"}) {
    setenv("LIBATTNRES_NUM_THREADS", bad, 1);
    EXPECT_EQ(run(call), ATTNRES_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(attnres_last_error_message()),
              std::string("LIBATTNRES_NUM_THREADS: expected an integer >= 1, got '") + bad + "'");
  }
  EXPECT(std::isnan(call.buffers[kOutput].get(0)));  // refused before anything was written
  setenv("LIBATTNRES_NUM_THREADS", "0", 1);
  EXPECT_EQ(run(call, 2), ATTNRES_OK);  // the argument comes first
  setenv("LIBATTNRES_NUM_THREADS", "2", 1);
  EXPECT_EQ(run(call), ATTNRES_OK);
  unsetenv("LIBATTNRES_NUM_THREADS");
}
