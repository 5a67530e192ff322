/* SPDX-License-Identifier: Apache-2.0
 * Each struct of this program's header ends where readable memory ends, so that a library which touches a field
 * the program does not have dies. Built with older/attnres/attnres.h, and with the header of today. */
#define _DEFAULT_SOURCE
#include <attnres/attnres.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int failures = 0;

static void expect(int condition, const char* what) {
  if (!condition) {
    fprintf(stderr, "failed: %s (%s)\n", what, attnres_last_error_message());
    ++failures;
  }
}

/* `size` bytes of ones; what follows them cannot be accessed. */
static void* last_bytes(size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  char* pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED || mprotect(pages + page, page, PROT_NONE) != 0) {
    perror("mmap");
    return NULL;
  }
  return memset(pages + page - size, 0xff, size);
}

int main(void) {
  enum { H = 7168 };
  static float prefix[H], delta[H], weight[H], output[H];
  const attnres_forward_args defaults = ATTNRES_FORWARD_ARGS_INIT;
  attnres_forward_args* args = last_bytes(sizeof(*args));
  attnres_plan_info* plan = last_bytes(sizeof(*plan));
  attnres_probe_info* probe = last_bytes(sizeof(*probe));
  attnres_permutation* permutation = last_bytes(sizeof(*permutation));
  attnres_status status;
  int h;
  if (args == NULL || plan == NULL || probe == NULL || permutation == NULL) return 1;

  for (h = 0; h < H; ++h) {
    prefix[h] = (float)(h % 7 - 3);
    delta[h] = (float)(h % 5 - 2);
    weight[h] = 1.0f;
  }
  *args = defaults;
  args->num_tokens = 1;
  args->hidden_size = H;
  args->prefix = prefix;
  args->delta = delta;
  args->norm_weight = args->qk_weight = weight;
  args->output = output;
  args->prefix_stride = args->delta_stride = args->output_stride = H;
  args->num_bank_tokens = 1;
  args->dtype = ATTNRES_FLOAT32;
  expect(attnres_check(args, 0) == ATTNRES_OK, "attnres_check");
  expect(attnres_forward_host(args) == ATTNRES_OK, "attnres_forward_host");
  for (h = 0; h < H; ++h) {
    /* One source: its weight is exactly 1. */
    const float p = (float)(h % 7 - 3) + (float)(h % 5 - 2);
    expect(prefix[h] == p && output[h] == p, "the answer of a call without bank rows");
  }

  probe->struct_size = sizeof(*probe);
  expect(attnres_probe(-1, probe) == ATTNRES_OK, "attnres_probe");
  expect(probe->struct_size == sizeof(*probe), "the size of the caller's struct stays");
  expect(memchr(probe->reason, '\0', sizeof(probe->reason)) != NULL, "a reason that ends");
  expect(probe->native != 0 || probe->reason[0] != '\0', "a reason");

  args->dtype = ATTNRES_BFLOAT16;
  plan->struct_size = sizeof(*plan);
  status = attnres_plan_for(args, 9, 0, 132, plan);
  if (attnres_num_permutations() > 0) {
    permutation->struct_size = sizeof(*permutation);
    expect(attnres_get_permutation(0, permutation) == ATTNRES_OK, "attnres_get_permutation");
    expect(permutation->hidden_size == H, "the permutation's hidden size");
    /* Unsupported only where the kernels were not built for this GPU. */
    expect(status == ATTNRES_OK || strstr(probe->built_targets, "90a") == NULL, "attnres_plan_for");
    if (status == ATTNRES_OK) {
      expect(plan->permutation.num_sources == 1 && plan->grid_size > 0, "what the plan says");
    }
  } else {
    expect(status == ATTNRES_UNSUPPORTED, "a build without kernels has no plan");
  }
  if (failures == 0) {
    printf("libattnres %s matches, with args of %d bytes\n", attnres_version_string(),
           (int)sizeof(*args));
  }
  return failures != 0;
}
