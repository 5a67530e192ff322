// SPDX-License-Identifier: Apache-2.0
// The native kernels against float64 through the C interface: every compiled permutation forced in
// turn. The calls are small, so that the program also runs under compute-sanitizer. Skipped without
// a GPU that the library has kernels for.
#include <cuda_runtime_api.h>

#include <algorithm>

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
  explicit DeviceCase(const ForwardCase& host, bool only_required = false) {
    for (int i = 0; i < kCount; ++i) {
      const std::vector<unsigned char>& bytes = host.buffers[i].bytes;
      if (bytes.empty()) continue;
      require_cuda(cudaMalloc(&pointers_[i], bytes.size()), "cudaMalloc");
    }
    if (only_required) {
      upload_required(host);
    } else {
      upload(host);
    }
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
  // The output alone.
  std::vector<unsigned char> download_output(const ForwardCase& host) const {
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<unsigned char> bytes(host.buffers[kOutput].bytes.size());
    require_cuda(cudaMemcpy(bytes.data(), pointers_[kOutput], bytes.size(), cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
    return bytes;
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
  // Only what the call may read; the rest stays as cudaMalloc left it.
  void upload_required(const ForwardCase& host) {
    const auto upload_range = [&](int index, size_t begin, size_t size) {
      if (size == 0) return;
      require_cuda(
          cudaMemcpy(static_cast<unsigned char*>(pointers_[index]) + begin,
                     host.buffers[index].bytes.data() + begin, size, cudaMemcpyHostToDevice),
          "cudaMemcpy");
    };
    for (const int index : {kPrefix, kDelta, kNormWeight, kQkWeight, kOutputNormWeight}) {
      upload_range(index, 0, host.buffers[index].bytes.size());
    }
    const size_t row_size = host.row_stride() * format_of(host.shape.dtype).size;
    for (int64_t entry = 0; entry < host.num_entries(); ++entry) {
      upload_range(kBlocks, entry * host.shape.num_bank_rows * row_size,
                   host.shape.num_blocks * row_size);
    }
  }

  void* pointers_[kCount] = {};
};

struct Forced {
  int32_t kernel = ATTNRES_KERNEL_AUTO;
  int32_t rows_per_stage = 0;
  int32_t ctas_per_sm = 0;
  int32_t cluster_size = 0;
  int32_t rows_in_flight = 0;
  int32_t pdl = ATTNRES_PDL_WAIT;

  attnres_forward_args apply(attnres_forward_args args) const {
    args.kernel = kernel;
    args.rows_per_stage = rows_per_stage;
    args.ctas_per_sm = ctas_per_sm;
    args.cluster_size = cluster_size;
    args.rows_in_flight = rows_in_flight;
    args.pdl = pdl;
    return args;
  }

  std::string name() const {
    return " kernel=" + std::to_string(kernel) +
           " rows_per_stage=" + std::to_string(rows_per_stage) +
           " ctas_per_sm=" + std::to_string(ctas_per_sm) +
           " cluster_size=" + std::to_string(cluster_size) +
           " rows_in_flight=" + std::to_string(rows_in_flight) + " pdl=" + std::to_string(pdl);
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
        // The smallest ring: every slot is filled again within a token.
        forced.ctas_per_sm = 1;
        forced.rows_in_flight = std::max(2, permutation.rows_per_stage);
        expect_right(shape, forced, &permutation);
      }
    }
  }
}

// Calls `body` for the permutations that `wanted` accepts, and expects some.
template <typename Wanted, typename Body>
void for_each_permutation(const Wanted& wanted, const Body& body) {
  require_native();
  int judged = 0;
  for (int32_t index = 0; index < attnres_num_permutations(); ++index) {
    attnres_permutation permutation{};
    permutation.struct_size = sizeof(permutation);
    EXPECT_EQ(attnres_get_permutation(index, &permutation), ATTNRES_OK);
    if (!wanted(permutation)) continue;
    body(permutation);
    ++judged;
  }
  EXPECT(judged > 0);
}

void expect_family_is_right(int32_t kernel) {
  for_each_permutation([&](const attnres_permutation& p) { return p.kernel == kernel; },
                       expect_permutation_is_right);
}

// Of the three kernels that differ in output norm and common path alone, one: every N meets every NC, B and
// cluster size, and all three forms meet each of these.
bool is_sampled(const attnres_permutation& p) {
  const int form = p.has_output_norm + p.static_common_path;
  return form == (p.num_sources + p.rows_per_stage + p.prefixes_per_row + p.cluster_size) % 3;
}

// A call whose unread memory was never written gives the bits of one where it was.
void expect_reads_only_required(const attnres_permutation& permutation) {
  Shape shape{.num_tokens = 2 * permutation.prefixes_per_row,
              .prefixes_per_entry = permutation.prefixes_per_row,
              .num_bank_rows = 9,
              .hidden_size = permutation.hidden_size,
              .num_blocks = permutation.num_sources - 1};
  shape.has_output_norm = permutation.has_output_norm != 0;
  shape.has_delta = permutation.static_common_path != 0 || permutation.num_sources % 2 == 0;
  if (permutation.static_common_path == 0 && permutation.prefixes_per_row == 1) {
    shape.block_write_idx = 8;
  } else if (permutation.static_common_path == 0) {
    shape.has_delta = permutation.has_output_norm == 0;
  }
  Forced forced{.kernel = permutation.kernel,
                .rows_per_stage = permutation.rows_per_stage,
                .cluster_size = permutation.cluster_size};
  forced.pdl = permutation.num_sources % 3;
  const ForwardCase call(shape);
  const DeviceCase whole(call), required(call, true);
  for (const DeviceCase* device : {&whole, &required}) {
    const attnres_forward_args args = forced.apply(call.args(device->pointers()));
    if (attnres_forward(&args, nullptr) != ATTNRES_OK) {
      return fail_case(shape, forced, attnres_last_error_message());
    }
  }
  if (whole.download_output(call) != required.download_output(call)) {
    fail_case(shape, forced, "memory that must not be read changed the output");
  }
}

}  // namespace

TEST_CASE(every_ring_permutation_matches_float64) { expect_family_is_right(ATTNRES_KERNEL_RING); }

TEST_CASE(every_cluster_permutation_matches_float64) {
  expect_family_is_right(ATTNRES_KERNEL_CLUSTER);
}

// What the sanitizers run, which take too long for every permutation: tests/sanitize.py.
TEST_CASE(sampled_permutations_match_float64) {
  for_each_permutation(is_sampled, expect_permutation_is_right);
}

TEST_CASE(sampled_permutations_read_only_what_they_must) {
  for_each_permutation(is_sampled, expect_reads_only_required);
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
