/* SPDX-License-Identifier: Apache-2.0
 * The C header in plain C99: two tokens whose answer is known by hand. */
#include <math.h>
#include <stdio.h>

#include "attnres/attnres.h"

int main(void) {
  /* The bank row equals p, so both scores are equal, both weights 1/2, and mixed is p. */
  float prefix[2][4] = {{1, 2, 3, 4}, {-1, 0, 1, 2}};
  const float delta[2][4] = {{1, 0, 0, -1}, {0, 0, 0, 0.5f}};
  float blocks[2][2][4] = {{{2, 2, 3, 3}, {9, 9, 9, 9}}, {{-1, 0, 1, 2.5f}, {9, 9, 9, 9}}};
  const float ones[4] = {1, 1, 1, 1};
  float output[2][4];
  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  attnres_status status;
  int m, h, wrong = 0;

  args.num_tokens = args.num_bank_tokens = 2;
  args.num_bank_rows = 2;
  args.hidden_size = 4;
  args.num_blocks = 1;
  args.block_write_idx = 1;
  args.prefix = prefix;
  args.delta = delta;
  args.blocks = blocks;
  args.norm_weight = args.qk_weight = ones;
  args.output = output;
  args.prefix_stride = args.delta_stride = args.blocks_row_stride = args.output_stride = 4;
  args.blocks_token_stride = 8;
  args.dtype = ATTNRES_FLOAT32;

  status = attnres_forward_host(&args);
  if (status != ATTNRES_OK) {
    fprintf(stderr, "%s: %s\n", attnres_status_name(status), attnres_last_error_message());
    return 1;
  }
  for (m = 0; m < 2; ++m) {
    for (h = 0; h < 4; ++h) {
      const float p = blocks[m][0][h];
      wrong += prefix[m][h] != p || blocks[m][1][h] != p || !(fabsf(output[m][h] - p) < 1e-6f);
    }
  }
  args.num_blocks = 3;
  wrong += attnres_forward_host(&args) != ATTNRES_INVALID_ARGUMENT;
  printf("libattnres %s from C: %d wrong\n", attnres_version_string(), wrong);
  return wrong != 0;
}
