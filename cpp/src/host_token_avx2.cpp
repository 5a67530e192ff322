// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "host_token.hpp"

#if defined(ATTNRES_HOST_AVX2)

// After the standard headers: an inline function of theirs compiled for this target could be the
// copy that the linker keeps for the whole program.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#define ATTNRES_HOST_LANES 8
#define ATTNRES_HOST_TABLE kAvx2Kernels
#define ATTNRES_HOST_TARGET "avx2"
#include "host_token.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // defined(ATTNRES_HOST_AVX2)
