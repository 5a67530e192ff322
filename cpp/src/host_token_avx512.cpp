// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "host_token.hpp"

#if defined(ATTNRES_HOST_AVX512)

// After the standard headers: an inline function of theirs compiled for this target could be the
// copy that the linker keeps for the whole program.
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")

#define ATTNRES_HOST_LANES 16
#define ATTNRES_HOST_TABLE kAvx512Kernels
#define ATTNRES_HOST_TARGET "avx512"
#include "host_token.inl"

#pragma GCC pop_options

#endif  // defined(ATTNRES_HOST_AVX512)
