// SPDX-License-Identifier: Apache-2.0
// The native kernels against float64 through the C interface: every compiled permutation forced in
// turn. The calls are small, so that the program also runs under compute-sanitizer. Skipped without
// a GPU that the library has kernels for.
#include <cuda_runtime_api.h>

#include "forward_case.hpp"
#include "test_runner.hpp"

using namespace forward_case;

namespace {

void require_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

void require_native() {
  attnres_probe_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(attnres_probe(-1, &info), ATTNRES_OK);
  if (info.native == 0) throw test_runner::Skip{info.reason};
}

// The buffers of a case in device memory.
class DeviceCase {
 public:
  explicit DeviceCase(const ForwardCase& host) {
    for (int i = 0; i < kCount; ++i) {
      const std::vector<unsigned char>& bytes = host.buffers[i].bytes;
      if (bytes.empty()) continue;
      require_cuda(cudaMalloc(&pointers_[i], bytes.size()), "cudaMalloc");
    }
    upload(host);
  }
  ~DeviceCase() {
    for (void* pointer : pointers_) cudaFree(pointer);
  }
  DeviceCase(const DeviceCase&) = delete;
  DeviceCase& operator=(const DeviceCase&) = delete;

  void* const* pointers() const { return pointers_; }

  void upload(const ForwardCase& host) {
    for (int i = 0; i < kCount; ++i) {
      const std::vector<unsigned char>& bytes = host.buffers[i].bytes;
      if (bytes.empty()) continue;
      require_cuda(cudaMemcpy(pointers_[i], bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
                   "cudaMemcpy");
    }
  }
  void download(ForwardCase& host) const {
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int i = 0; i < kCount; ++i) {
      std::vector<unsigned char>& bytes = host.buffers[i].bytes;
      if (bytes.empty()) continue;
      require_cuda(cudaMemcpy(bytes.data(), pointers_[i], bytes.size(), cudaMemcpyDeviceToHost),
                   "cudaMemcpy");
    }
  }

 private:
  void* pointers_[kCount] = {};
};

struct Forced {
  int32_t kernel = ATTNRES_KERNEL_AUTO;
  int32_t rows_per_stage = 0;
  int32_t ctas_per_sm = 0;
  int32_t cluster_size = 0;
  int32_t pdl = ATTNRES_PDL_WAIT;

  attnres_forward_args apply(attnres_forward_args args) const {
    args.kernel = kernel;
    args.rows_per_stage = rows_per_stage;
    args.ctas_per_sm = ctas_per_sm;
    args.cluster_size = cluster_size;
    args.pdl = pdl;
    return args;
  }

  std::string name() const {
    return " kernel=" + std::to_string(kernel) +
           " rows_per_stage=" + std::to_string(rows_per_stage) +
           " ctas_per_sm=" + std::to_string(ctas_per_sm) +
           " cluster_size=" + std::to_string(cluster_size) + " pdl=" + std::to_string(pdl);
  }
};

void fail_case(const Shape& shape, const Forced& forced, const std::string& what) {
  test_runner::fail(__FILE__, __LINE__, name_of(shape) + forced.name() + ": " + what);
}

// Judges one call, and a second one by the first one's bits. `wanted` is the permutation that must
// run.
void expect_right(const Shape& shape, const Forced& forced,
                  const attnres_permutation* wanted = nullptr) {
  const ForwardCase before(shape);
  ForwardCase call = before, again = before;
  DeviceCase device(before);
  const attnres_forward_args args = forced.apply(call.args(device.pointers()));
  attnres_plan_info plan{};
  plan.struct_size = sizeof(plan);
  if (attnres_plan(&args, &plan) != ATTNRES_OK) {
    return fail_case(shape, forced, attnres_last_error_message());
  }
  if (wanted != nullptr && std::memcmp(&plan.permutation, wanted, sizeof(*wanted)) != 0) {
    return fail_case(shape, forced, "another permutation would run");
  }
  if (attnres_forward(&args, nullptr) != ATTNRES_OK) {
    return fail_case(shape, forced, attnres_last_error_message());
  }
  device.download(call);
  const std::string wrong = call.mismatch(before.expected());
  if (!wrong.empty()) return fail_case(shape, forced, wrong);

  device.upload(before);
  EXPECT_EQ(attnres_forward(&args, nullptr), ATTNRES_OK);
  device.download(again);
  for (int i = 0; i < kCount; ++i) {
    if (again.buffers[i].bytes != call.buffers[i].bytes) {
      return fail_case(shape, forced, "another run gave other bits");
    }
  }
}

void expect_permutation_is_right(const attnres_permutation& permutation) {
  const bool ring = permutation.kernel == ATTNRES_KERNEL_RING;
  for (const bool has_delta : {true, false}) {
    for (const bool writes : {false, true}) {
      const bool common_path = permutation.has_output_norm != 0 && has_delta && !writes;
      if (common_path != (permutation.static_common_path != 0)) continue;
      if (writes && permutation.prefixes_per_row > 1) continue;
      const int32_t num_blocks = permutation.num_sources - 1;
      Shape shape{.num_tokens = 2 * permutation.prefixes_per_row,
                  .prefixes_per_entry = permutation.prefixes_per_row,
                  .num_bank_rows = 9,
                  .hidden_size = permutation.hidden_size,
                  .num_blocks = num_blocks};
      // Over a row that is read, where there is one.
      shape.block_write_idx = writes ? num_blocks / 2 : -1;
      shape.has_delta = has_delta;
      shape.has_output_norm = permutation.has_output_norm != 0;
      shape.padding = writes ? 8 : 0;
      Forced forced{.kernel = permutation.kernel,
                    .rows_per_stage = permutation.rows_per_stage,
                    .cluster_size = permutation.cluster_size};
      // Each PDL mode meets each family, and each residency each ring kernel that may have it.
      forced.pdl = (permutation.num_sources + (has_delta ? 1 : 0)) % 3;
      expect_right(shape, forced, &permutation);
      if (ring && has_delta) {
        forced.ctas_per_sm = 1;
        expect_right(shape, forced, &permutation);
      }
    }
  }
}

void expect_family_is_right(int32_t kernel) {
  require_native();
  int judged = 0;
  for (int32_t index = 0; index < attnres_num_permutations(); ++index) {
    attnres_permutation permutation{};
    permutation.struct_size = sizeof(permutation);
    EXPECT_EQ(attnres_get_permutation(index, &permutation), ATTNRES_OK);
    if (permutation.kernel != kernel) continue;
    expect_permutation_is_right(permutation);
    ++judged;
  }
  EXPECT(judged > 0);
}

}  // namespace

TEST_CASE(every_ring_permutation_matches_float64) { expect_family_is_right(ATTNRES_KERNEL_RING); }

TEST_CASE(every_cluster_permutation_matches_float64) {
  expect_family_is_right(ATTNRES_KERNEL_CLUSTER);
}

TEST_CASE(persistent_blocks_walk_many_tokens) {
  require_native();
  // About three tokens for each of an H200's blocks: stages and statistics are reused across
  // tokens.
  for (const int32_t rows_per_stage : {1, 2, 3}) {
    expect_right(
        {.num_tokens = 400, .hidden_size = 7168, .num_blocks = 8},
        {.kernel = ATTNRES_KERNEL_RING, .rows_per_stage = rows_per_stage, .ctas_per_sm = 1});
  }
  expect_right({.num_tokens = 301,
                .hidden_size = 7168,
                .num_blocks = 2,
                .block_write_idx = 1,
                .has_output_norm = false},
               {.kernel = ATTNRES_KERNEL_RING});
}

TEST_CASE(automatic_plan_matches_float64) {
  require_native();
  for (const int64_t num_tokens : {1, 17, 133}) {
    expect_right({.num_tokens = num_tokens, .hidden_size = 7168, .num_blocks = 5}, {});
  }
}

TEST_CASE(refused_calls_launch_nothing) {
  require_native();
  const ForwardCase before({.hidden_size = 7168});
  ForwardCase after = before;
  DeviceCase device(before);
  attnres_forward_args args = after.args(device.pointers());
  args.output = args.prefix;
  EXPECT_EQ(attnres_forward(&args, nullptr), ATTNRES_INVALID_ARGUMENT);
  args = after.args(device.pointers());
  args.cluster_size = 16;  // not compiled
  EXPECT_EQ(attnres_forward(&args, nullptr), ATTNRES_UNSUPPORTED);
  device.download(after);
  for (int i = 0; i < kCount; ++i) EXPECT(after.buffers[i].bytes == before.buffers[i].bytes);
}
