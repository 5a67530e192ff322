// SPDX-License-Identifier: Apache-2.0
// The vectorised inner part of the host backend, once per instruction set. One translation unit per
// target (host_token_*.cpp) compiles host_token.inl under that target; host_forward.cpp picks a
// table by asking the processor.
#pragma once

#include <cstdint>

#include "attnres/attnres.h"

#if defined(__x86_64__)
#define ATTNRES_HOST_AVX2
#if !defined(__clang__)
// Clang's releases disagree on the features that a function with 512-bit vectors must name.
#define ATTNRES_HOST_AVX512
#endif
#endif

namespace attnres {

// Rows in scratch memory are padded to a multiple of this many floats, so that every target may
// work in whole vectors, and start at a multiple of as many bytes or more.
constexpr int64_t kScratchFloats = 64;

// Bank rows of a token at most.
constexpr int kMaxHostBankRows = 8;

struct HostKernels {
  const char* target;

  // query = float(norm_weight) * float(qk_weight), in the order of the target's vectors,
  // zero-padded.
  using PrepareQuery = void (*)(const void* norm_weight, const void* qk_weight, int64_t hidden_size,
                                float* query);
  // Tokens begin..end-1 of one call. `own` is scratch memory of the calling thread, one padded row.
  template <typename Args>
  using Tokens = void (*)(const Args& args, const float* query, int64_t begin, int64_t end,
                          float* own);

  // By dtype: ATTNRES_BFLOAT16, ATTNRES_FLOAT16, ATTNRES_FLOAT32.
  PrepareQuery prepare_query[3];
  Tokens<attnres_forward_args> forward_tokens[3];
  // `query` holds one padded row for each call site, `own` kMaxHostBankRows floats for each after its row.
  Tokens<attnres_bank_args> bank_tokens[3];
  Tokens<attnres_merge_args> merge_tokens[3];
};

extern const HostKernels kBaselineKernels;  // what the compiler may assume everywhere: SSE2, NEON
#if defined(ATTNRES_HOST_AVX2)
extern const HostKernels kAvx2Kernels;
#endif
#if defined(ATTNRES_HOST_AVX512)
extern const HostKernels kAvx512Kernels;
#endif

}  // namespace attnres
