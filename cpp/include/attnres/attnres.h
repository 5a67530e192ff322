/* SPDX-License-Identifier: Apache-2.0
 *
 * attnres.h: the C interface of libattnres, the Attention Residuals forward operator
 * (arXiv 2603.15031). Plain C99; needs neither the CUDA headers nor PyTorch.
 *
 * For each token m (bank entry t = m / B, B = num_tokens / num_bank_tokens):
 *
 *   p        = prefix[m] + delta[m]        (one rounding; prefix[m] <- p when delta is given)
 *   v_i      = blocks[t, i], i < num_blocks;  v_N-1 = p;  N = num_blocks + 1
 *   score_i  = dot(v_i, norm_weight * qk_weight) * rsqrt(mean(v_i^2) + eps)
 *   mixed    = sum_i softmax(score)_i * v_i             (float32)
 *   output   = mixed, or mixed * rsqrt(mean(mixed^2) + output_norm_eps) * output_norm_weight
 *   blocks[t, block_write_idx] <- p        (when block_write_idx >= 0, after every bank row was read)
 *
 * Every function is thread-safe. Every function that returns attnres_status leaves a message for the
 * calling thread when it fails; see attnres_last_error_message(). A call that returns
 * ATTNRES_INVALID_ARGUMENT or ATTNRES_UNSUPPORTED has written nothing.
 */
#ifndef ATTNRES_ATTNRES_H_
#define ATTNRES_ATTNRES_H_

#include <stddef.h>
#include <stdint.h>

#define ATTNRES_VERSION_MAJOR 0
#define ATTNRES_VERSION_MINOR 1
#define ATTNRES_VERSION_PATCH 0

#if defined(ATTNRES_BUILDING_LIBRARY)
#define ATTNRES_API __attribute__((visibility("default")))
#else
#define ATTNRES_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The CUDA runtime's cudaStream_t is `struct CUstream_st*`; NULL is the legacy default stream. */
struct CUstream_st;

typedef enum attnres_status {
  ATTNRES_OK = 0,
  ATTNRES_INVALID_ARGUMENT = 1, /* an argument is wrong for every backend */
  ATTNRES_UNSUPPORTED = 2,      /* a valid call that this kernel, device or build cannot serve */
  ATTNRES_CUDA_ERROR = 3,       /* the CUDA runtime refused; the message carries its error */
  ATTNRES_INTERNAL_ERROR = 4    /* out of host memory, or a defect */
} attnres_status;

/* Values of the int32_t fields below; 0 is always the default. */
enum { ATTNRES_BFLOAT16 = 0, ATTNRES_FLOAT16 = 1, ATTNRES_FLOAT32 = 2 };
enum {
  ATTNRES_PDL_WAIT = 0, /* only weights are read before griddepcontrol.wait */
  ATTNRES_PDL_EARLY =
      1,              /* bank rows are read before it too: the caller promises that no kernel that
                            may still be running writes rows 0..num_blocks-1 */
  ATTNRES_PDL_OFF = 2 /* launched without the programmatic-serialization attribute */
};
enum { ATTNRES_KERNEL_AUTO = 0, ATTNRES_KERNEL_RING = 1, ATTNRES_KERNEL_CLUSTER = 2 };

/* One forward call. Pointers are device pointers for attnres_forward and host pointers for
 * attnres_forward_host. Strides count elements; the last dimension has stride 1. `prefix` with a
 * delta, `blocks` with a write and `output` must not overlap another argument or themselves; strides of
 * arrays that are only read may be anything >= 0. attnres_forward needs bases and strides that are
 * multiples of 16 bytes. Start from ATTNRES_FORWARD_ARGS_INIT and set the fields by name. */
typedef struct attnres_forward_args {
  size_t struct_size; /* sizeof(attnres_forward_args) of the header the caller was built with */

  int64_t num_tokens;      /* M: rows of prefix, delta and output; 0 is valid and does nothing */
  int64_t num_bank_tokens; /* T: entries of the bank; M must be a multiple of T */
  int64_t num_bank_rows;   /* R: rows per bank entry */
  int64_t hidden_size;     /* H */
  int32_t num_blocks;      /* bank rows read, 0..min(8, R) */
  int32_t block_write_idx; /* bank row that receives p, -1 for none; needs B = 1 when >= 0 */

  void* prefix;                   /* [M, H] */
  const void* delta;              /* [M, H] or NULL */
  void* blocks;                   /* [T, R, H]; may be NULL when R = 0 */
  const void* norm_weight;        /* [H] */
  const void* qk_weight;          /* [H] */
  const void* output_norm_weight; /* [H] or NULL for no output norm */
  void* output;                   /* [M, H] */

  int64_t prefix_stride;       /* between tokens */
  int64_t delta_stride;        /* between tokens; ignored without delta */
  int64_t blocks_token_stride; /* between bank entries */
  int64_t blocks_row_stride;   /* between the rows of one entry */
  int64_t output_stride;       /* between tokens */

  float eps;             /* of the scores' RMSNorm, >= 0 */
  float output_norm_eps; /* of the output's RMSNorm, >= 0 */

  int32_t dtype;  /* ATTNRES_BFLOAT16, ...; attnres_forward takes bfloat16 alone */
  int32_t pdl;    /* ATTNRES_PDL_* (ignored by attnres_forward_host) */
  int32_t device; /* CUDA device ordinal, -1 for the calling thread's current device */

  /* Overrides of the plan, each 0 for the plan's own choice (ignored by attnres_forward_host). */
  int32_t kernel;         /* ATTNRES_KERNEL_* */
  int32_t rows_per_stage; /* NC of the ring kernel: 1, 2 or 3 */
  int32_t ctas_per_sm;    /* residency of the ring kernel: 1 or 2 */
  int32_t cluster_size;   /* thread blocks per token of the cluster kernel */
  int32_t rows_in_flight; /* rows that the ring kernels of an SM fetch ahead at most, >= 2 */

  /* Of attnres_forward_host: 0 for LIBATTNRES_NUM_THREADS, or one per available core. */
  int32_t num_threads;

  /* 1: a token's bits depend neither on M nor on its place in the batch; -1: they may; 0: as
   * LIBATTNRES_BATCH_INVARIANT says (0 or 1; unset: 0). attnres_forward then takes a ring kernel that
   * depends on num_blocks alone, or the one that the overrides name. attnres_forward_host always is. */
  int32_t batch_invariant;
} attnres_forward_args;

#define ATTNRES_FORWARD_ARGS_INIT               \
  {.struct_size = sizeof(attnres_forward_args), \
   .block_write_idx = -1,                       \
   .eps = 1e-5f,                                \
   .output_norm_eps = 1e-5f,                    \
   .device = -1}

/* The bank's share of S calls, the first of two phases. Bank rows are parameters of no call: once written
 * they serve every call until the next write, and only p changes from call to call. For each bank entry t
 * and call site s, whose weights are norm_weights[s] and qk_weights[s],
 *
 *   score_i    = as above, i < num_blocks
 *   bank[s, t] = sum_i softmax(score)_i * blocks[t, i]      (sums in float32)
 *   lse[s, t]  = log(sum_i exp(score_i))
 *
 * Pointers are device pointers for attnres_bank and host pointers for attnres_bank_host. Strides count
 * elements; the last dimension has stride 1. `bank` and `lse` must not overlap another argument or
 * themselves. attnres_bank needs bases and strides that are multiples of 16 bytes, but for those of lse.
 * Start from ATTNRES_BANK_ARGS_INIT and set the fields by name. */
typedef struct attnres_bank_args {
  size_t struct_size; /* sizeof(attnres_bank_args) of the header the caller was built with */

  int64_t num_bank_tokens; /* T: entries of the bank; 0 is valid and does nothing */
  int64_t num_bank_rows;   /* R: rows per bank entry */
  int64_t hidden_size;     /* H */
  int32_t num_blocks;      /* bank rows read, 1..min(8, R) */
  int32_t num_sites;       /* S, 1..1024 */

  const void* blocks;       /* [T, R, H] */
  const void* norm_weights; /* [S, H] */
  const void* qk_weights;   /* [S, H] */
  void* bank;               /* [S, T, H] */
  float* lse;               /* [S, T] */

  int64_t blocks_token_stride; /* between bank entries */
  int64_t blocks_row_stride;   /* between the rows of one entry */
  int64_t norm_weights_stride; /* between call sites */
  int64_t qk_weights_stride;   /* between call sites */
  int64_t bank_site_stride;    /* between call sites */
  int64_t bank_token_stride;   /* between tokens */
  int64_t lse_stride;          /* between call sites */

  float eps; /* of the scores' RMSNorm, >= 0 */

  int32_t dtype;        /* of blocks and weights; attnres_bank takes bfloat16 alone */
  int32_t float32_bank; /* 1: bank is float32; 0: it has the dtype of blocks */
  int32_t pdl;          /* ATTNRES_PDL_* (ignored by attnres_bank_host) */
  int32_t device;       /* CUDA device ordinal, -1 for the calling thread's current device */

  int32_t
      num_clusters; /* clusters that share the entries, for each share of the sites; 0: the plan's */
  int32_t num_threads;     /* as in attnres_forward_args */
  int32_t batch_invariant; /* as in attnres_forward_args, M being T */
} attnres_bank_args;

#define ATTNRES_BANK_ARGS_INIT \
  {.struct_size = sizeof(attnres_bank_args), .eps = 1e-5f, .device = -1}

/* One call from what attnres_bank left for its call site, the second of two phases:
 *
 *   p       = prefix[m] + delta[m]         (one rounding; prefix[m] <- p when delta is given)
 *   score_p = dot(p, norm_weight * qk_weight) * rsqrt(mean(p^2) + eps)
 *   mixed   = (exp(lse[t]) * bank[t] + exp(score_p) * p) / (exp(lse[t]) + exp(score_p))
 *
 * and output and blocks[t, block_write_idx] as above. `prefix` with a delta, `blocks` with a write and
 * `output` must not overlap another argument or themselves; strides and alignment as for the other
 * structs. With ATTNRES_PDL_EARLY the caller promises that no kernel that may still be running writes
 * bank or lse. Start from ATTNRES_MERGE_ARGS_INIT and set the fields by name. */
typedef struct attnres_merge_args {
  size_t struct_size; /* sizeof(attnres_merge_args) of the header the caller was built with */

  int64_t num_tokens;      /* M: rows of prefix, delta and output; 0 is valid and does nothing */
  int64_t num_bank_tokens; /* T: entries of bank, lse and blocks; M must be a multiple of T */
  int64_t num_bank_rows;   /* R: rows per entry of blocks; ignored without a write */
  int64_t hidden_size;     /* H */
  int32_t block_write_idx; /* row of blocks that receives p, -1 for none; needs B = 1 when >= 0 */
  int32_t float32_bank;    /* 1: bank is float32; 0: it has the dtype of prefix */

  void* prefix;                   /* [M, H] */
  const void* delta;              /* [M, H] or NULL */
  const void* bank;               /* [T, H], of one call site */
  const float* lse;               /* [T], of one call site */
  const void* norm_weight;        /* [H] */
  const void* qk_weight;          /* [H] */
  const void* output_norm_weight; /* [H] or NULL for no output norm */
  void* blocks;                   /* [T, R, H]; ignored without a write */
  void* output;                   /* [M, H] */

  int64_t prefix_stride;       /* between tokens */
  int64_t delta_stride;        /* between tokens; ignored without delta */
  int64_t bank_stride;         /* between bank entries */
  int64_t blocks_token_stride; /* between bank entries */
  int64_t blocks_row_stride;   /* between the rows of one entry */
  int64_t output_stride;       /* between tokens */

  float eps;             /* of the scores' RMSNorm, >= 0 */
  float output_norm_eps; /* of the output's RMSNorm, >= 0 */

  int32_t dtype;  /* ATTNRES_BFLOAT16, ...; attnres_merge takes bfloat16 alone */
  int32_t pdl;    /* ATTNRES_PDL_* (ignored by attnres_merge_host) */
  int32_t device; /* CUDA device ordinal, -1 for the calling thread's current device */

  /* Overrides of the plan, as in attnres_forward_args. */
  int32_t kernel;
  int32_t rows_per_stage;
  int32_t ctas_per_sm;
  int32_t cluster_size;
  int32_t rows_in_flight;

  int32_t num_threads;     /* as in attnres_forward_args */
  int32_t batch_invariant; /* as in attnres_forward_args */
} attnres_merge_args;

#define ATTNRES_MERGE_ARGS_INIT               \
  {.struct_size = sizeof(attnres_merge_args), \
   .block_write_idx = -1,                     \
   .eps = 1e-5f,                              \
   .output_norm_eps = 1e-5f,                  \
   .device = -1}

/* One compiled kernel: a line of the table cuda/instances.cmake. */
typedef struct attnres_permutation {
  size_t struct_size;
  int32_t kernel;           /* ATTNRES_KERNEL_RING or ATTNRES_KERNEL_CLUSTER */
  int32_t hidden_size;      /* H */
  int32_t num_sources;      /* N = num_blocks + 1 */
  int32_t rows_per_stage;   /* NC; 0 for the cluster kernel */
  int32_t prefixes_per_row; /* B */
  int32_t cluster_size;     /* 0 for the ring kernel */
  int32_t has_output_norm;  /* HAS_OUTPUT_NORM */
  /* STATIC_COMMON_PATH: delta, output norm and no write, at compile time. */
  int32_t static_common_path;
} attnres_permutation;

/* What a call would launch. */
typedef struct attnres_plan_info {
  size_t struct_size;
  attnres_permutation permutation;
  int32_t ctas_per_sm;
  int32_t grid_size;           /* thread blocks */
  int32_t block_size;          /* threads per block */
  int32_t shared_memory_bytes; /* dynamic shared memory per block */
  int32_t ring_rows;           /* rows the ring holds; 0 for the cluster kernel */
} attnres_plan_info;

/* What the library can do on a device. */
typedef struct attnres_probe_info {
  size_t struct_size;
  int32_t native; /* 1 when attnres_forward can run there */
  int32_t device; /* ordinal that was probed */
  int32_t compute_major, compute_minor;
  int32_t num_sms;
  int32_t driver_version;  /* as cudaDriverGetVersion, e.g. 13000; 0 without a driver */
  int32_t runtime_version; /* of the CUDA runtime linked into the library; 0 without CUDA */
  char device_name[128];
  char target[16];        /* compiled target that would run, e.g. "90a"; empty without one */
  char built_targets[64]; /* compiled targets, e.g. "90a;100a;103a" */
  char reason[256];       /* why native is 0, or empty */
  char plan[256]; /* where the plan comes from: "built-in" or a file and line; empty when native
                             is 0 */
  char plan_error
      [512]; /* what is wrong with the file of LIBATTNRES_PLAN_FILE, or empty; attnres_forward
                             refuses every call then */
} attnres_probe_info;

/* Run the operator on `stream` of `args->device`. Asynchronous and capturable into a CUDA graph once
 * attnres_warmup() or an earlier call has loaded the kernels; never synchronises. */
ATTNRES_API attnres_status attnres_forward(const attnres_forward_args* args,
                                           struct CUstream_st* stream);

/* Run the operator on the CPU; returns when the results are in memory. bfloat16, float16, float32. */
ATTNRES_API attnres_status attnres_forward_host(const attnres_forward_args* args);

/* Move the bytes that attnres_forward(args, stream) must move, bank rows read, prefix updated, row and
 * output written, and compute nothing of the operator: output receives the plain sum of the rows. A lower
 * bound for benchmarks, measured beside the operator. `prefix` and `blocks` are written as by
 * attnres_forward. The plan overrides are ignored. */
ATTNRES_API attnres_status attnres_floor(const attnres_forward_args* args,
                                         struct CUstream_st* stream);

/* Validate a call as attnres_forward (on_device != 0: also what only the native kernels require) or
 * attnres_forward_host would, and do nothing else. Needs no GPU and dereferences no pointer of args. */
ATTNRES_API attnres_status attnres_check(const attnres_forward_args* args, int32_t on_device);

/* The two phases on `stream` of `args->device`, as attnres_forward runs the operator. */
ATTNRES_API attnres_status attnres_bank(const attnres_bank_args* args, struct CUstream_st* stream);
ATTNRES_API attnres_status attnres_merge(const attnres_merge_args* args,
                                         struct CUstream_st* stream);

/* Move the bytes that attnres_bank(args, stream) must move, bank rows read, bank and lse written, and compute
 * nothing of it: a lower bound for benchmarks, as attnres_floor is for the operator. (A merge has that of one
 * bank row.) */
ATTNRES_API attnres_status attnres_bank_floor(const attnres_bank_args* args,
                                              struct CUstream_st* stream);

/* The two phases on the CPU, as attnres_forward_host runs the operator. */
ATTNRES_API attnres_status attnres_bank_host(const attnres_bank_args* args);
ATTNRES_API attnres_status attnres_merge_host(const attnres_merge_args* args);

/* Validate a call of either phase, as attnres_check does one of the operator. */
ATTNRES_API attnres_status attnres_check_bank(const attnres_bank_args* args, int32_t on_device);
ATTNRES_API attnres_status attnres_check_merge(const attnres_merge_args* args, int32_t on_device);

/* Which kernel and launch attnres_forward would use: the overrides' first, then the plan of the file that
 * LIBATTNRES_PLAN_FILE names, where it has one for the device, then the built-in plan. The file is read once
 * per process. */
ATTNRES_API attnres_status attnres_plan(const attnres_forward_args* args, attnres_plan_info* plan);

/* The same for a GPU that need not be there: `num_sms` multiprocessors, compute capability major.minor. */
ATTNRES_API attnres_status attnres_plan_for(const attnres_forward_args* args, int32_t compute_major,
                                            int32_t compute_minor, int32_t num_sms,
                                            attnres_plan_info* plan);

/* Never fails for want of a GPU, a driver or a kernel: `info->native` and `info->reason` say so.
 * `device` -1 is the current device. The answer is kept per device, but for a reason that may pass. */
ATTNRES_API attnres_status attnres_probe(int32_t device, attnres_probe_info* info);

/* Load every kernel for `device` (-1: current), so that a first call may be captured. */
ATTNRES_API attnres_status attnres_warmup(int32_t device);

/* The compiled permutations, 0 <= index < attnres_num_permutations(). */
ATTNRES_API int32_t attnres_num_permutations(void);
ATTNRES_API attnres_status attnres_get_permutation(int32_t index, attnres_permutation* permutation);

/* Version of the library: 10000 * major + 100 * minor + patch, and as text. */
ATTNRES_API int32_t attnres_version(void);
ATTNRES_API const char* attnres_version_string(void);

/* "ATTNRES_OK", ... for a status; a static string. */
ATTNRES_API const char* attnres_status_name(attnres_status status);

/* Why the calling thread's latest failing call failed, "argument: expected ..., got ..." for argument
 * errors. Valid until that thread's next call; never NULL. */
ATTNRES_API const char* attnres_last_error_message(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ATTNRES_ATTNRES_H_ */
