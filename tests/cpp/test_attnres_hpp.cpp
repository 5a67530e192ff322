// SPDX-License-Identifier: Apache-2.0
// The C++ wrapper: the same call through views gives the C interface's bytes, and failures are
// Errors.
#include "attnres/attnres.hpp"

#include "forward_case.hpp"
#include "test_runner.hpp"

using namespace forward_case;

namespace {

template <typename T>
attnres::ForwardArgs<T> wrapped(ForwardCase& call) {
  const auto pointer = [&](int index) { return static_cast<T*>(call.buffers[index].data()); };
  const auto h = static_cast<size_t>(call.shape.hidden_size);
  const int64_t m = call.shape.num_tokens, stride = call.row_stride();
  return {.prefix = {pointer(kPrefix), m, stride},
          .delta = {pointer(kDelta), m, stride},
          .blocks = {pointer(kBlocks), call.num_entries(), call.shape.num_bank_rows,
                     call.shape.num_bank_rows * stride, stride},
          .norm_weight = {pointer(kNormWeight), h},
          .qk_weight = {pointer(kQkWeight), h},
          .output_norm_weight = {pointer(kOutputNormWeight), call.shape.has_output_norm ? h : 0},
          .num_blocks = call.shape.num_blocks,
          .block_write_idx = call.shape.block_write_idx,
          .eps = call.shape.eps,
          .output_norm_eps = call.shape.output_norm_eps,
          .output = {pointer(kOutput), m, stride}};
}

template <typename T>
void expect_right(const Shape& shape) {
  ForwardCase call(shape);
  const ForwardCase::Expected expected = call.expected();
  attnres::check(wrapped<T>(call), false);
  attnres::forward_host(wrapped<T>(call));
  EXPECT_EQ(call.mismatch(expected), "");
}

template <typename Body>
void expect_error(attnres_status status, const std::string& message, Body&& body) {
  try {
    body();
  } catch (const attnres::Error& error) {
    EXPECT_EQ(error.status(), status);
    EXPECT_EQ(std::string(error.what()), message);
    return;
  }
  test_runner::fail(__FILE__, __LINE__, "expected an Error: " + message);
}

}  // namespace

TEST_CASE(host_forward_of_every_element_type) {
  expect_right<attnres::bfloat16>({.block_write_idx = 1, .padding = 8});
  expect_right<attnres::float16>(
      {.has_delta = false, .has_output_norm = false, .dtype = ATTNRES_FLOAT16});
  expect_right<float>({.num_tokens = 4, .prefixes_per_entry = 2, .dtype = ATTNRES_FLOAT32});
}

TEST_CASE(failures_are_errors_with_status_and_message) {
  ForwardCase call({});
  attnres::ForwardArgs<attnres::bfloat16> args = wrapped<attnres::bfloat16>(call);
  args.num_blocks = 9;
  const std::string range = "num_blocks: expected 0..8, got 9";
  expect_error(ATTNRES_INVALID_ARGUMENT, range, [&] { attnres::check(args, true); });
  expect_error(ATTNRES_INVALID_ARGUMENT, range, [&] { attnres::forward_host(args); });
  expect_error(ATTNRES_INVALID_ARGUMENT, range, [&] { attnres::forward(args); });
  expect_error(ATTNRES_INVALID_ARGUMENT, range, [&] { attnres::plan(args); });
  expect_error(ATTNRES_INVALID_ARGUMENT, range, [&] { attnres::plan_for(args, 9, 0, 132); });
}

TEST_CASE(sizes_that_disagree_are_errors) {
  ForwardCase call({});
  using Args = attnres::ForwardArgs<attnres::bfloat16>;
  const auto refused = [&](const std::string& message, auto change) {
    Args args = wrapped<attnres::bfloat16>(call);
    change(args);
    expect_error(ATTNRES_INVALID_ARGUMENT, message, [&] { attnres::check(args, false); });
  };
  refused("qk_weight: expected 64 elements, got 63",
          [](Args& a) { a.qk_weight = a.qk_weight.first(63); });
  refused("output_norm_weight: expected 64 elements, got 1",
          [](Args& a) { a.output_norm_weight = a.output_norm_weight.first(1); });
  refused("delta: expected 3 tokens, got 2", [](Args& a) { a.delta.num_tokens = 2; });
  refused("out: expected 3 tokens, got 4", [](Args& a) { a.output.num_tokens = 4; });
}

TEST_CASE(library_is_described) {
  EXPECT_EQ(attnres::version(), std::string(attnres_version_string()));
  EXPECT_EQ(static_cast<int32_t>(attnres::permutations().size()), attnres_num_permutations());
  const attnres_probe_info info = attnres::probe();
  EXPECT_EQ(info.native == 0, info.reason[0] != '\0');
  if (info.native == 0) {
    try {
      attnres::warmup();
      EXPECT(!"warmup must fail without a device");
    } catch (const attnres::Error& error) {
      EXPECT(error.what()[0] != '\0');
    }
  }
}
