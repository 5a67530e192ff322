// SPDX-License-Identifier: Apache-2.0
// One forward call on the CPU. Builds and runs anywhere.
#include <attnres/attnres.hpp>
#include <cstdio>
#include <vector>

int main() try {
  constexpr int M = 4, R = 8, H = 1024;  // tokens, bank rows, hidden size
  std::vector<float> prefix(M * H, 1.0f), delta(M * H, 0.5f), blocks(M * R * H, 2.0f);
  const std::vector<float> norm_weight(H, 1.0f), qk_weight(H, 0.02f);
  std::vector<float> output(M * H);

  attnres::forward_host(attnres::ForwardArgs<float>{
      .prefix = {.data = prefix.data(), .num_tokens = M, .stride = H},
      .delta = {.data = delta.data(), .num_tokens = M, .stride = H},
      .blocks = {.data = blocks.data(),
                 .num_tokens = M,
                 .num_rows = R,
                 .token_stride = R * H,
                 .row_stride = H},
      .norm_weight = norm_weight,
      .qk_weight = qk_weight,
      .num_blocks = 3,       // read rows 0, 1 and 2 ...
      .block_write_idx = 3,  // ... and write the updated prefix to row 3
      .output = {.data = output.data(), .num_tokens = M, .stride = H},
  });

  // Rows 0 to 2 hold 2, the prefix becomes 1 + 0.5; all score alike, so the output is their mean.
  std::printf("prefix %.4f, bank row 3 %.4f, output %.4f\n", prefix[0], blocks[3 * H], output[0]);
  const bool right =
      prefix[0] == 1.5f && blocks[3 * H] == 1.5f && output[0] > 1.8749f && output[0] < 1.8751f;
  return right ? 0 : 1;
} catch (const attnres::Error& error) {
  std::fprintf(stderr, "%s: %s\n", attnres_status_name(error.status()), error.what());
  return 1;
}
