// SPDX-License-Identifier: Apache-2.0
// A C++20 program: two prefixes share each bank entry, rows are padded, compared with the
// operator's equations in double; and what the wrapper adds to the C interface.
#include <attnres/attnres.hpp>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

namespace {

constexpr int M = 4, T = 2, R = 3, H = 24, kStride = H + 8, kNumBlocks = 3;

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

std::vector<float> values(int count, int seed) {
  std::vector<float> all(count);
  for (int i = 0; i < count; ++i) all[i] = static_cast<float>((i * 31 + seed) % 23 - 11) / 8.0f;
  return all;
}

std::vector<double> expected_row(const float* prefix, const float* bank,
                                 const std::vector<float>& weight, const std::vector<float>& query,
                                 double eps) {
  std::vector<double> mixed(H, 0.0);
  double shares = 0.0;
  for (int i = 0; i <= kNumBlocks; ++i) {
    const float* row = i < kNumBlocks ? bank + i * kStride : prefix;
    double squares = 0.0, product = 0.0;
    for (int h = 0; h < H; ++h) {
      squares += double{row[h]} * row[h];
      product += double{row[h]} * weight[h] * query[h];
    }
    const double share = std::exp(product / std::sqrt(squares / H + eps));
    shares += share;
    for (int h = 0; h < H; ++h) mixed[h] += share * row[h];
  }
  for (double& value : mixed) value /= shares;
  return mixed;
}

}  // namespace

int main() {
  std::vector<float> prefix = values(M * kStride, 3), blocks = values(T * R * kStride, 5);
  const std::vector<float> norm_weight = values(H, 7), qk_weight = values(H, 13);
  std::vector<float> output(M * H, std::numeric_limits<float>::quiet_NaN());
  const std::vector<float> prefix_before = prefix, blocks_before = blocks;

  attnres::ForwardArgs<float> args{
      .prefix = {.data = prefix.data(), .num_tokens = M, .stride = kStride},
      .blocks = {.data = blocks.data(),
                 .num_tokens = T,
                 .num_rows = R,
                 .token_stride = R * kStride,
                 .row_stride = kStride},
      .norm_weight = norm_weight,
      .qk_weight = qk_weight,
      .num_blocks = kNumBlocks,
      .output = {.data = output.data(), .num_tokens = M, .stride = H},
  };
  attnres::forward_host(args);

  for (int m = 0; m < M; ++m) {
    const auto row = expected_row(&prefix[m * kStride], &blocks[m / (M / T) * R * kStride],
                                  norm_weight, qk_weight, args.eps);
    for (int h = 0; h < H; ++h) {
      expect(std::abs(output[m * H + h] - row[h]) <= 1e-5 * (1.0 + std::abs(row[h])), "output");
    }
  }
  expect(prefix == prefix_before && blocks == blocks_before, "nothing else is written");

  bool refused = false;
  args.block_write_idx = 0;
  try {
    attnres::forward_host(args);
  } catch (const attnres::Error& error) {
    refused = error.status() == ATTNRES_INVALID_ARGUMENT &&
              std::string(error.what()).find("block_write_idx") != std::string::npos;
  }
  expect(refused, "a write with a shared bank entry throws and names the argument");

  const attnres_probe_info probe = attnres::probe();
  const bool built_with_cuda = probe.built_targets[0] != '\0';
  expect(built_with_cuda == !attnres::permutations().empty(), "targets and kernels go together");
  expect(attnres::version() == std::to_string(ATTNRES_VERSION_MAJOR) + "." +
                                   std::to_string(ATTNRES_VERSION_MINOR) + "." +
                                   std::to_string(ATTNRES_VERSION_PATCH),
         "header and library have one version");

  if (failures == 0)
    std::printf("libattnres %s: C++ forward matches\n", attnres::version().c_str());
  return failures != 0;
}
