// SPDX-License-Identifier: Apache-2.0
// Exact answers to "do two strided arrays share a byte?".
#pragma once

#include <cstdint>

namespace attnres {

// The bytes base + i * stride[0] + j * stride[1] + [0, length) for i < count[0], j < count[1].
// Counts and length are positive, strides are >= 0, and `end`, one past the last byte, fits in
// int64_t.
struct Region {
  uintptr_t base;
  uintptr_t end;
  int64_t count[2];
  int64_t stride[2];
  int64_t length;
};

// Whether two regions share a byte. O(1) for separate ranges, else O(min(count) * log(stride)).
bool overlap(const Region& a, const Region& b);

// Whether two segments of one region share a byte. O(1) for nested strides, else O(min(count)).
bool overlaps_itself(const Region& region);

}  // namespace attnres
