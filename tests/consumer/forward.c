/* SPDX-License-Identifier: Apache-2.0
 * A C99 program: one forward call on the host, compared with the operator's equations in double. */
#include <attnres/attnres.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { M = 3, R = 3, H = 16, NUM_BLOCKS = 2, WRITE = 2 };

static int failures = 0;

static void expect(int condition, const char* what) {
  if (!condition) {
    fprintf(stderr, "failed: %s (%s)\n", what, attnres_last_error_message());
    ++failures;
  }
}

static float value(int index) { return (float)((index * 37 + 11) % 29 - 14) / 16.0f; }

static double dot(const float* a, const double* b) {
  double sum = 0.0;
  for (int h = 0; h < H; ++h) sum += a[h] * b[h];
  return sum;
}

static double squares(const double* a) {
  double sum = 0.0;
  for (int h = 0; h < H; ++h) sum += a[h] * a[h];
  return sum;
}

int main(void) {
  static float prefix[M][H], delta[M][H], blocks[M][R][H], output[M][H];
  static float norm_weight[H], qk_weight[H], output_norm_weight[H];
  static double expected[M][H];
  static float updated[M][H];
  double query[H];

  for (int h = 0; h < H; ++h) {
    norm_weight[h] = 1.0f + value(h);
    qk_weight[h] = value(h + 5);
    output_norm_weight[h] = 1.0f - value(h + 9);
    query[h] = (double)norm_weight[h] * qk_weight[h];
  }
  for (int m = 0; m < M; ++m) {
    for (int h = 0; h < H; ++h) {
      prefix[m][h] = value(m * H + h);
      delta[m][h] = value(m * H + h + 3);
      updated[m][h] = prefix[m][h] + delta[m][h];
      output[m][h] = NAN;
      for (int r = 0; r < R; ++r)
        blocks[m][r][h] = r < NUM_BLOCKS ? value((m * R + r) * H + h + 7) : NAN;
    }
  }

  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  args.num_tokens = M;
  args.num_bank_tokens = M;
  args.num_bank_rows = R;
  args.hidden_size = H;
  args.num_blocks = NUM_BLOCKS;
  args.block_write_idx = WRITE;
  args.prefix = prefix;
  args.delta = delta;
  args.blocks = blocks;
  args.norm_weight = norm_weight;
  args.qk_weight = qk_weight;
  args.output_norm_weight = output_norm_weight;
  args.output = output;
  args.prefix_stride = args.delta_stride = args.blocks_row_stride = args.output_stride = H;
  args.blocks_token_stride = (int64_t)R * H;
  args.dtype = ATTNRES_FLOAT32;

  for (int m = 0; m < M; ++m) {
    double score[NUM_BLOCKS + 1], mixed[H] = {0.0}, largest = -INFINITY, sum = 0.0;
    for (int i = 0; i <= NUM_BLOCKS; ++i) {
      const float* row = i < NUM_BLOCKS ? blocks[m][i] : updated[m];
      double as_double[H];
      for (int h = 0; h < H; ++h) as_double[h] = row[h];
      score[i] = dot(row, query) / sqrt(squares(as_double) / H + args.eps);
      largest = fmax(largest, score[i]);
    }
    for (int i = 0; i <= NUM_BLOCKS; ++i) sum += score[i] = exp(score[i] - largest);
    for (int i = 0; i <= NUM_BLOCKS; ++i) {
      const float* row = i < NUM_BLOCKS ? blocks[m][i] : updated[m];
      for (int h = 0; h < H; ++h) mixed[h] += score[i] / sum * row[h];
    }
    const double scale = 1.0 / sqrt(squares(mixed) / H + args.output_norm_eps);
    for (int h = 0; h < H; ++h) expected[m][h] = mixed[h] * scale * output_norm_weight[h];
  }

  expect(attnres_forward_host(&args) == ATTNRES_OK, "attnres_forward_host");
  for (int m = 0; m < M; ++m) {
    for (int h = 0; h < H; ++h) {
      expect(fabs(output[m][h] - expected[m][h]) <= 1e-5 * (1.0 + fabs(expected[m][h])), "output");
    }
    expect(memcmp(prefix[m], updated[m], sizeof(updated[m])) == 0, "prefix is updated");
    expect(memcmp(blocks[m][WRITE], updated[m], sizeof(updated[m])) == 0,
           "the bank row is written");
  }

  args.num_blocks = R + 1;
  expect(attnres_forward_host(&args) == ATTNRES_INVALID_ARGUMENT, "a refusal");
  expect(strstr(attnres_last_error_message(), "num_blocks") != NULL,
         "the message names the argument");

  attnres_probe_info probe = {.struct_size = sizeof(probe)};
  expect(attnres_probe(-1, &probe) == ATTNRES_OK, "attnres_probe");
  expect(probe.native || probe.reason[0] != '\0', "the probe gives a reason");
  expect(attnres_version() >=
             10000 * ATTNRES_VERSION_MAJOR + 100 * ATTNRES_VERSION_MINOR + ATTNRES_VERSION_PATCH,
         "the library is at least as new as its header");

  if (failures == 0) printf("libattnres %s: C forward matches\n", attnres_version_string());
  return failures != 0;
}
