// SPDX-License-Identifier: Apache-2.0
// A forward call on the GPU, captured into a CUDA graph, replayed, and compared with the CPU backend.
// Exits with 77 where the native kernels cannot run.
#include <cuda_runtime_api.h>

#include <attnres/attnres.hpp>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

using attnres::bfloat16;

namespace {

constexpr int M = 16, R = 8, H = 7168;  // tokens, bank rows, hidden size
constexpr int kNumBlocks = 3, kReplays = 5;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

float to_float(bfloat16 value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }

// Normally distributed; the lower half of a float is cut off, which rounds towards zero.
std::vector<bfloat16> random_values(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<bfloat16> values(count);
  for (bfloat16& value : values) {
    value.bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(engine)) >> 16);
  }
  return values;
}

// A copy of host values in GPU memory.
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<bfloat16>& host) : count_(host.size()) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(bfloat16)));
    check(cudaMemcpy(data_, host.data(), count_ * sizeof(bfloat16), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  operator std::span<bfloat16>() { return {data_, count_}; }
  std::vector<bfloat16> to_host() const {
    std::vector<bfloat16> host(count_);
    check(cudaMemcpy(host.data(), data_, count_ * sizeof(bfloat16), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  bfloat16* data_ = nullptr;
  std::size_t count_;
};

// The same call for host and for device memory.
attnres::ForwardArgs<bfloat16> make_args(std::span<bfloat16> prefix, std::span<bfloat16> delta,
                                         std::span<bfloat16> blocks,
                                         std::span<bfloat16> norm_weight,
                                         std::span<bfloat16> qk_weight,
                                         std::span<bfloat16> output) {
  return {
      .prefix = {.data = prefix.data(), .num_tokens = M, .stride = H},
      .delta = {.data = delta.data(), .num_tokens = M, .stride = H},
      .blocks = {.data = blocks.data(),
                 .num_tokens = M,
                 .num_rows = R,
                 .token_stride = R * H,
                 .row_stride = H},
      .norm_weight = norm_weight,
      .qk_weight = qk_weight,
      .num_blocks = kNumBlocks,
      .block_write_idx = kNumBlocks,
      .output = {.data = output.data(), .num_tokens = M, .stride = H},
  };
}

int count_different_bits(const std::vector<bfloat16>& a, const std::vector<bfloat16>& b) {
  int different = 0;
  for (std::size_t i = 0; i < a.size(); ++i) different += a[i].bits != b[i].bits;
  return different;
}

}  // namespace

int main() try {
  const attnres_probe_info probe = attnres::probe();
  if (!probe.native) {
    std::printf("the native kernels cannot run here: %s\n", probe.reason);
    return 77;
  }
  std::printf("libattnres %s on %s\n", attnres::version().c_str(), probe.device_name);

  std::vector<bfloat16> prefix = random_values(M * H, 1), delta = random_values(M * H, 2);
  std::vector<bfloat16> blocks = random_values(M * R * H, 3);
  std::vector<bfloat16> norm_weight = random_values(H, 4), qk_weight = random_values(H, 5);
  std::vector<bfloat16> output(M * H, bfloat16{0x7fc0});  // NaN, so that nothing is right by chance

  DeviceArray gpu_prefix(prefix), gpu_delta(delta), gpu_blocks(blocks);
  DeviceArray gpu_norm_weight(norm_weight), gpu_qk_weight(qk_weight), gpu_output(output);
  const auto gpu_args =
      make_args(gpu_prefix, gpu_delta, gpu_blocks, gpu_norm_weight, gpu_qk_weight, gpu_output);

  // Kernels are loaded by their first launch, which a capture does not allow: load them before.
  attnres::warmup();
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  attnres::forward(gpu_args, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  for (int i = 0; i < kReplays; ++i) check(cudaGraphLaunch(replay, stream));
  check(cudaStreamSynchronize(stream));
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));

  const auto host_args = make_args(prefix, delta, blocks, norm_weight, qk_weight, output);
  for (int i = 0; i < kReplays; ++i) attnres::forward_host(host_args);

  // Both round the prefix once to the same bits; sums have another order, so outputs may differ by a rounding.
  const int wrong_prefix = count_different_bits(gpu_prefix.to_host(), prefix);
  const int wrong_blocks = count_different_bits(gpu_blocks.to_host(), blocks);
  const std::vector<bfloat16> gpu_result = gpu_output.to_host();
  double error = 0.0, total = 0.0;
  for (std::size_t i = 0; i < output.size(); ++i) {
    const double expected = to_float(output[i]), difference = to_float(gpu_result[i]) - expected;
    error += difference * difference;
    total += expected * expected;
  }
  const double relative_error = std::sqrt(error / total);
  std::printf("%d replays: %d wrong values in prefix, %d in the bank, relative L2 error %.2e\n",
              kReplays, wrong_prefix, wrong_blocks, relative_error);
  const bool right = wrong_prefix == 0 && wrong_blocks == 0 && relative_error <= 4e-3;
  std::printf("%s\n", right ? "matches the CPU" : "WRONG");
  return right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
