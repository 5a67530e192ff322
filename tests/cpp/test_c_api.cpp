// SPDX-License-Identifier: Apache-2.0
// The border itself: structs of other versions, messages per thread, answers without a GPU.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include "forward_case.hpp"
#include "test_runner.hpp"

using namespace forward_case;

TEST_CASE(older_caller_gets_the_defaults) {
  // A caller built before eps and everything after it existed; what follows its struct is not read.
  ForwardCase call({.hidden_size = 40, .eps = 1e-5f, .output_norm_eps = 1e-5f});
  const ForwardCase::Expected expected = call.expected();
  attnres_forward_args args = call.args();
  args.struct_size = offsetof(attnres_forward_args, eps);
  std::memset(&args.eps, 0xff, sizeof(args) - args.struct_size);
  EXPECT_EQ(attnres_check(&args, 1), ATTNRES_OK);
  EXPECT_EQ(attnres_forward_host(&args), ATTNRES_OK);
  EXPECT_EQ(call.mismatch(expected), "");
}

TEST_CASE(newer_caller_is_served_unless_it_uses_what_is_unknown) {
  struct Newer {
    attnres_forward_args known;
    int64_t unknown[2];
  } newer{};
  ForwardCase call({});
  newer.known = call.args();
  newer.known.struct_size = sizeof(newer);
  EXPECT_EQ(attnres_forward_host(&newer.known), ATTNRES_OK);
  newer.unknown[1] = 1;
  EXPECT_EQ(attnres_forward_host(&newer.known), ATTNRES_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(attnres_last_error_message()),
            std::string("args: expected 0 in every field that libattnres ") +
                attnres_version_string() + " does not know, got another value");
}

TEST_CASE(struct_without_a_size_is_refused) {
  ForwardCase call({});
  for (const size_t size : {size_t{0}, size_t{8}, offsetof(attnres_forward_args, eps) - 1}) {
    attnres_forward_args args = call.args();
    args.struct_size = size;
    EXPECT_EQ(attnres_check(&args, 0), ATTNRES_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(attnres_last_error_message()),
              "args: expected struct_size >= 144, got " + std::to_string(size));
  }
  attnres_probe_info info{};
  EXPECT_EQ(attnres_probe(-1, &info), ATTNRES_INVALID_ARGUMENT);
  attnres_permutation permutation{};
  EXPECT_EQ(attnres_get_permutation(0, &permutation), ATTNRES_INVALID_ARGUMENT);
  attnres_plan_info plan{};
  const attnres_forward_args args = call.args();
  EXPECT_EQ(attnres_plan(&args, &plan), ATTNRES_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(attnres_last_error_message()).find("plan: expected struct_size >= "),
            size_t{0});
}

TEST_CASE(struct_sizes_of_no_version_are_refused) {
  // What lies behind the structs must not even be looked at, so there is nothing behind them.
  ForwardCase call({});
  attnres_probe_info info{};
  for (const size_t size : {sizeof(attnres_forward_args) + 1, size_t{4100}, SIZE_MAX - 3}) {
    attnres_forward_args args = call.args();
    args.struct_size = info.struct_size = size;
    const std::string wanted =
        ": expected struct_size <= 4096 that is a multiple of 4, got " + std::to_string(size);
    EXPECT_EQ(attnres_check(&args, 0), ATTNRES_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(attnres_last_error_message()), "args" + wanted);
    if (size <= sizeof(info)) continue;
    EXPECT_EQ(attnres_probe(0, &info), ATTNRES_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(attnres_last_error_message()), "info" + wanted);
  }
}

TEST_CASE(messages_are_printable_whatever_a_variable_holds) {
  ForwardCase call({});
  const attnres_forward_args args = call.args();
  for (const std::string& value : {std::string("\x1b[31m\n\xff\t"), std::string(100000, '\xc3')}) {
    for (const char* name : {"LIBATTNRES_NUM_THREADS", "LIBATTNRES_BATCH_INVARIANT"}) {
      setenv(name, value.c_str(), 1);
      EXPECT_EQ(attnres_forward_host(&args), ATTNRES_INVALID_ARGUMENT);
      const std::string message = attnres_last_error_message();
      EXPECT_EQ(message.find(std::string(name) + ": expected "), size_t{0});
      for (const char c : message) EXPECT(c >= 0x20 && c < 0x7f);
      unsetenv(name);
    }
  }
}

TEST_CASE(null_structs_are_refused) {
  EXPECT_EQ(attnres_forward(nullptr, nullptr), ATTNRES_INVALID_ARGUMENT);
  EXPECT_EQ(attnres_forward_host(nullptr), ATTNRES_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(attnres_last_error_message()), "args: expected a pointer, got NULL");
  EXPECT_EQ(attnres_probe(0, nullptr), ATTNRES_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(attnres_last_error_message()), "info: expected a pointer, got NULL");
}

TEST_CASE(results_fill_exactly_the_callers_struct) {
  // An older caller's struct ends before device_name; a newer one goes on, and is told 0.
  struct Newer {
    attnres_probe_info known;
    unsigned char more[24];
  } newer;
  std::memset(&newer, 0x5a, sizeof(newer));
  newer.known.struct_size = offsetof(attnres_probe_info, device_name);
  EXPECT_EQ(attnres_probe(-1, &newer.known), ATTNRES_OK);
  EXPECT_EQ(newer.known.struct_size, offsetof(attnres_probe_info, device_name));
  for (const char c : newer.known.device_name) EXPECT_EQ(c, 0x5a);

  newer.known.struct_size = sizeof(newer);
  EXPECT_EQ(attnres_probe(-1, &newer.known), ATTNRES_OK);
  EXPECT_EQ(newer.known.struct_size, sizeof(newer));
  for (const unsigned char byte : newer.more) EXPECT_EQ(int{byte}, 0);
}

TEST_CASE(probe_never_fails_and_gives_a_reason) {
  attnres_probe_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(attnres_probe(-1, &info), ATTNRES_OK);
  EXPECT_EQ(info.native == 0, std::strlen(info.reason) > 0);
  EXPECT_EQ(attnres_probe(12345, &info), ATTNRES_OK);
  EXPECT_EQ(info.native, 0);
  EXPECT(std::strlen(info.reason) > 0);
}

TEST_CASE(permutations_are_listed_up_to_their_number) {
  const int32_t count = attnres_num_permutations();
  attnres_permutation permutation{};
  for (int32_t index = 0; index < count; ++index) {
    permutation.struct_size = sizeof(permutation);
    EXPECT_EQ(attnres_get_permutation(index, &permutation), ATTNRES_OK);
    const bool ring = permutation.kernel == ATTNRES_KERNEL_RING;
    EXPECT(ring || permutation.kernel == ATTNRES_KERNEL_CLUSTER);
    EXPECT_EQ(permutation.cluster_size == 0, ring);
    EXPECT_EQ(permutation.rows_per_stage != 0, ring);
    EXPECT(permutation.num_sources >= 1 && permutation.num_sources <= 9);
    EXPECT(permutation.static_common_path == 0 || permutation.has_output_norm == 1);
  }
  permutation.struct_size = sizeof(permutation);
  for (const int32_t index : {-1, count}) {
    EXPECT_EQ(attnres_get_permutation(index, &permutation), ATTNRES_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(attnres_last_error_message()).find("index: expected "), size_t{0});
  }
}

TEST_CASE(messages_belong_to_their_thread) {
  EXPECT_EQ(attnres_check(nullptr, 0), ATTNRES_INVALID_ARGUMENT);
  std::string elsewhere = "unset";
  std::thread([&] {
    elsewhere = attnres_last_error_message();
    attnres_probe(0, nullptr);
  }).join();
  EXPECT_EQ(elsewhere, "");
  EXPECT_EQ(std::string(attnres_last_error_message()), "args: expected a pointer, got NULL");
}

TEST_CASE(statuses_and_version_have_names) {
  EXPECT_EQ(std::string(attnres_status_name(ATTNRES_UNSUPPORTED)), "ATTNRES_UNSUPPORTED");
  EXPECT_EQ(std::string(attnres_status_name(static_cast<attnres_status>(77))),
            "unknown attnres_status");
  const int32_t version = attnres_version();
  EXPECT_EQ(std::string(attnres_version_string()), std::to_string(version / 10000) + "." +
                                                       std::to_string(version / 100 % 100) + "." +
                                                       std::to_string(version % 100));
}

TEST_CASE(a_zero_token_call_on_a_device_needs_no_device) {
  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  args.hidden_size = 7168;
  EXPECT_EQ(attnres_forward(&args, nullptr), ATTNRES_OK);
}
