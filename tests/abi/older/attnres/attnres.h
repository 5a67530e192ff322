/* SPDX-License-Identifier: Apache-2.0
 * attnres.h as an older program has it: before num_threads, ring_rows and the fields after them were appended to
 * their structs, and before attnres_floor. Tests build programs with it and run them with the library of today.
 * It is never brought up to date. */
#ifndef ATTNRES_ATTNRES_H_
#define ATTNRES_ATTNRES_H_

#include <stddef.h>
#include <stdint.h>

#define ATTNRES_VERSION_MAJOR 0
#define ATTNRES_VERSION_MINOR 1
#define ATTNRES_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

typedef enum attnres_status {
  ATTNRES_OK = 0,
  ATTNRES_INVALID_ARGUMENT = 1,
  ATTNRES_UNSUPPORTED = 2,
  ATTNRES_CUDA_ERROR = 3,
  ATTNRES_INTERNAL_ERROR = 4
} attnres_status;

enum { ATTNRES_BFLOAT16 = 0, ATTNRES_FLOAT16 = 1, ATTNRES_FLOAT32 = 2 };
enum { ATTNRES_PDL_WAIT = 0, ATTNRES_PDL_EARLY = 1, ATTNRES_PDL_OFF = 2 };
enum { ATTNRES_KERNEL_AUTO = 0, ATTNRES_KERNEL_RING = 1, ATTNRES_KERNEL_CLUSTER = 2 };

typedef struct attnres_forward_args {
  size_t struct_size;

  int64_t num_tokens;
  int64_t num_bank_tokens;
  int64_t num_bank_rows;
  int64_t hidden_size;
  int32_t num_blocks;
  int32_t block_write_idx;

  void* prefix;
  const void* delta;
  void* blocks;
  const void* norm_weight;
  const void* qk_weight;
  const void* output_norm_weight;
  void* output;

  int64_t prefix_stride;
  int64_t delta_stride;
  int64_t blocks_token_stride;
  int64_t blocks_row_stride;
  int64_t output_stride;

  float eps;
  float output_norm_eps;

  int32_t dtype;
  int32_t pdl;
  int32_t device;

  int32_t kernel;
  int32_t rows_per_stage;
  int32_t ctas_per_sm;
  int32_t cluster_size;
  int32_t rows_in_flight;
} attnres_forward_args;

#define ATTNRES_FORWARD_ARGS_INIT               \
  {.struct_size = sizeof(attnres_forward_args), \
   .block_write_idx = -1,                       \
   .eps = 1e-5f,                                \
   .output_norm_eps = 1e-5f,                    \
   .device = -1}

typedef struct attnres_permutation {
  size_t struct_size;
  int32_t kernel;
  int32_t hidden_size;
  int32_t num_sources;
  int32_t rows_per_stage;
  int32_t prefixes_per_row;
  int32_t cluster_size;
  int32_t has_output_norm;
  int32_t static_common_path;
} attnres_permutation;

typedef struct attnres_plan_info {
  size_t struct_size;
  attnres_permutation permutation;
  int32_t ctas_per_sm;
  int32_t grid_size;
  int32_t block_size;
  int32_t shared_memory_bytes;
} attnres_plan_info;

typedef struct attnres_probe_info {
  size_t struct_size;
  int32_t native;
  int32_t device;
  int32_t compute_major, compute_minor;
  int32_t num_sms;
  int32_t driver_version;
  int32_t runtime_version;
  char device_name[128];
  char target[16];
  char built_targets[64];
  char reason[256];
} attnres_probe_info;

attnres_status attnres_forward(const attnres_forward_args* args, struct CUstream_st* stream);
attnres_status attnres_forward_host(const attnres_forward_args* args);
attnres_status attnres_check(const attnres_forward_args* args, int32_t on_device);
attnres_status attnres_plan(const attnres_forward_args* args, attnres_plan_info* plan);
attnres_status attnres_plan_for(const attnres_forward_args* args, int32_t compute_major,
                                int32_t compute_minor, int32_t num_sms, attnres_plan_info* plan);
attnres_status attnres_probe(int32_t device, attnres_probe_info* info);
attnres_status attnres_warmup(int32_t device);
int32_t attnres_num_permutations(void);
attnres_status attnres_get_permutation(int32_t index, attnres_permutation* permutation);
int32_t attnres_version(void);
const char* attnres_version_string(void);
const char* attnres_status_name(attnres_status status);
const char* attnres_last_error_message(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ATTNRES_ATTNRES_H_ */
