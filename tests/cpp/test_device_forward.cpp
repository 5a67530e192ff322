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

// --- the two phases ------------------------------------------------------------------------------------

// What a bank pass leaves, in device memory: `sites` sites that all have the weights of the one call.
class DeviceBank {
 public:
  DeviceBank(const ForwardCase& host, int32_t sites, bool float32)
      : sites_(sites), float32_(float32), entries_(host.num_entries()) {
    const size_t rows = static_cast<size_t>(sites) * entries_;
    require_cuda(cudaMalloc(&bank_, rows * host.shape.hidden_size * (float32 ? 4 : 2)),
                 "cudaMalloc");
    require_cuda(cudaMalloc(reinterpret_cast<void**>(&lse_), rows * sizeof(float)), "cudaMalloc");
  }
  ~DeviceBank() {
    cudaFree(bank_);
    cudaFree(lse_);
  }
  DeviceBank(const DeviceBank&) = delete;
  DeviceBank& operator=(const DeviceBank&) = delete;

  attnres_bank_args bank_args(const ForwardCase& host, const DeviceCase& device) const {
    const Shape& shape = host.shape;
    attnres_bank_args args = ATTNRES_BANK_ARGS_INIT;
    args.num_bank_tokens = entries_;
    args.num_bank_rows = shape.num_bank_rows;
    args.hidden_size = shape.hidden_size;
    args.num_blocks = shape.num_blocks;
    args.num_sites = sites_;
    args.blocks = device.pointers()[kBlocks];
    args.norm_weights = device.pointers()[kNormWeight];
    args.qk_weights = device.pointers()[kQkWeight];
    args.bank = bank_;
    args.lse = lse_;
    args.blocks_token_stride = shape.num_bank_rows * host.row_stride();
    args.blocks_row_stride = host.row_stride();
    args.bank_site_stride = entries_ * shape.hidden_size;
    args.bank_token_stride = shape.hidden_size;
    args.lse_stride = entries_;
    args.eps = shape.eps;
    args.dtype = shape.dtype;
    args.float32_bank = float32_;
    return args;
  }

  attnres_merge_args merge_args(const ForwardCase& host, const DeviceCase& device, int32_t site,
                                const Forced& forced) const {
    const attnres_forward_args call = forced.apply(host.args(device.pointers()));
    const int64_t first = int64_t{site} * entries_;
    attnres_merge_args args = ATTNRES_MERGE_ARGS_INIT;
    args.num_tokens = call.num_tokens;
    args.num_bank_tokens = call.num_bank_tokens;
    args.num_bank_rows = call.num_bank_rows;
    args.hidden_size = call.hidden_size;
    args.block_write_idx = call.block_write_idx;
    args.float32_bank = float32_;
    args.prefix = call.prefix;
    args.delta = call.delta;
    args.bank = static_cast<unsigned char*>(bank_) + first * call.hidden_size * (float32_ ? 4 : 2);
    args.lse = lse_ + first;
    args.norm_weight = call.norm_weight;
    args.qk_weight = call.qk_weight;
    args.output_norm_weight = call.output_norm_weight;
    args.blocks = call.blocks;
    args.output = call.output;
    args.prefix_stride = call.prefix_stride;
    args.delta_stride = call.delta_stride;
    args.bank_stride = call.hidden_size;
    args.blocks_token_stride = call.blocks_token_stride;
    args.blocks_row_stride = call.blocks_row_stride;
    args.output_stride = call.output_stride;
    args.eps = call.eps;
    args.output_norm_eps = call.output_norm_eps;
    args.dtype = call.dtype;
    args.pdl = call.pdl;
    args.kernel = call.kernel;
    args.ctas_per_sm = call.ctas_per_sm;
    args.cluster_size = call.cluster_size;
    args.rows_in_flight = call.rows_in_flight;
    return args;
  }

 private:
  int32_t sites_;
  bool float32_;
  int64_t entries_;
  void* bank_ = nullptr;
  float* lse_ = nullptr;
};

// Runs both phases for the last site, right after each other; true when nothing was refused.
bool run_both(const ForwardCase& host, const DeviceCase& device, const DeviceBank& bank,
              int32_t sites, const Forced& forced) {
  const attnres_bank_args first = bank.bank_args(host, device);
  const attnres_merge_args second = bank.merge_args(host, device, sites - 1, forced);
  if (attnres_bank(&first, nullptr) == ATTNRES_OK &&
      attnres_merge(&second, nullptr) == ATTNRES_OK) {
    return true;
  }
  fail_case(host.shape, forced, attnres_last_error_message());
  return false;
}

// Judges both phases against the whole call, and a second time by the bits of the first.
void expect_both_right(const Shape& shape, int32_t sites, bool float32, const Forced& forced) {
  const ForwardCase before(shape);
  ForwardCase call = before, again = before;
  const DeviceCase device(before);
  DeviceCase second(before);
  const DeviceBank bank(before, sites, float32), other(before, sites, float32);
  if (!run_both(before, device, bank, sites, forced)) return;
  device.download(call);
  const std::string wrong = call.mismatch(before.expected());
  if (!wrong.empty()) return fail_case(shape, forced, wrong);
  if (!run_both(before, second, other, sites, forced)) return;
  second.download(again);
  for (int i = 0; i < kCount; ++i) {
    if (again.buffers[i].bytes != call.buffers[i].bytes) {
      return fail_case(shape, forced, "another run gave other bits");
    }
  }
}

// Every merge kernel once, and with them bank passes over 1 to 8 rows for some sites and for more than one part.
template <typename Body>
void for_each_merge(const Body& body) {
  require_native();
  const Forced kernels[] = {{.kernel = ATTNRES_KERNEL_RING},
                            {.kernel = ATTNRES_KERNEL_CLUSTER, .cluster_size = 2},
                            {.kernel = ATTNRES_KERNEL_CLUSTER, .cluster_size = 4},
                            {.kernel = ATTNRES_KERNEL_CLUSTER, .cluster_size = 7}};
  int turn = 0;
  for (const Forced& kernel : kernels) {
    for (const bool float32 : {false, true}) {
      for (const int form : {0, 1, 2}) {  // the common path; a write; neither delta nor output norm
        for (const int32_t prefixes : {1, 2}) {
          if (prefixes == 2 && (kernel.kernel == ATTNRES_KERNEL_CLUSTER || form == 1)) continue;
          Shape shape{.num_tokens = 3 * prefixes,
                      .prefixes_per_entry = prefixes,
                      .num_bank_rows = 9,
                      .hidden_size = 7168,
                      .num_blocks = 1 + turn % 8};
          shape.block_write_idx = form == 1 ? shape.num_blocks / 2 : -1;
          shape.has_delta = form != 2;
          shape.has_output_norm = form != 2;
          shape.padding = form == 1 ? 8 : 0;
          Forced forced = kernel;
          forced.pdl = turn % 2 == 0 ? ATTNRES_PDL_WAIT : ATTNRES_PDL_OFF;
          body(shape, turn % 3 == 0 ? 25 : 1 + turn % 5, float32, forced);
          ++turn;
        }
      }
    }
  }
}

// As expect_reads_only_required: the memory of the bank and of lse is new, and the operator's is what may be read.
void expect_both_read_only_required(const Shape& shape, int32_t sites, bool float32,
                                    const Forced& forced) {
  const ForwardCase call(shape);
  const DeviceCase whole(call), required(call, true);
  const DeviceBank bank(call, sites, float32), other(call, sites, float32);
  if (!run_both(call, whole, bank, sites, forced)) return;
  if (!run_both(call, required, other, sites, forced)) return;
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

TEST_CASE(both_phases_match_float64) { for_each_merge(expect_both_right); }

TEST_CASE(both_phases_read_only_what_they_must) { for_each_merge(expect_both_read_only_required); }

TEST_CASE(both_phases_walk_many_tokens) {
  require_native();
  // About seven groups for each of an H200's clusters, and three tokens for each of its blocks.
  for (const bool float32 : {false, true}) {
    expect_both_right({.num_tokens = 401, .hidden_size = 7168, .num_blocks = 8}, 24, float32,
                      {.kernel = ATTNRES_KERNEL_RING, .ctas_per_sm = 1, .rows_in_flight = 2});
  }
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
