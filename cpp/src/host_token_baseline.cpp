// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "host_token.hpp"

#define ATTNRES_HOST_LANES 4
#define ATTNRES_HOST_TABLE kBaselineKernels
#define ATTNRES_HOST_TARGET "baseline"
#include "host_token.inl"
