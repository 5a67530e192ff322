// SPDX-License-Identifier: Apache-2.0
#include "overlap.hpp"

#include <algorithm>

namespace attnres {
namespace {

// Products of two 64-bit numbers, for the search below.
__extension__ typedef __int128 Wide;

// A segment of a sequence `a` at x meets one of `b` at y when -a.length < x - y < b.length.
struct Sequence {
  int64_t base;
  int64_t count;
  int64_t stride;
  int64_t length;

  int64_t last() const { return base + (count - 1) * stride; }
};

// A stride of 0 repeats one segment.
Sequence simplified(Sequence s) {
  if (s.stride == 0) s.count = 1;
  if (s.count == 1) s.stride = 0;
  return s;
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }
int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

// Smallest x >= 0 with low <= (a * x) mod m <= high, or -1. Needs 0 <= a < m, 0 <= low <= high < m.
// Each step replaces (m, a) as Euclid's algorithm does, so the depth is logarithmic.
Wide first_in_window(Wide a, Wide m, Wide low, Wide high) {
  if (low == 0) return 0;
  if (a == 0) return -1;
  const Wide first = (low + a - 1) / a;  // first multiple of a that is not below the window
  if (first * a <= high) return first;
  // No multiple below m hits, so one must wrap: a x - m y in the window. Modulo a, that is
  // (m y) mod a in [-high, -low] mod a, a window that does not wrap because it holds no multiple of
  // a.
  const Wide low_next = ((-high) % a + a) % a;
  const Wide high_next = ((-low) % a + a) % a;
  const Wide y = first_in_window(m % a, a, low_next, high_next);
  if (y < 0) return -1;
  return (low + m * y + a - 1) / a;
}

bool sequences_overlap(Sequence a, Sequence b) {
  a = simplified(a);
  b = simplified(b);
  if (a.last() + a.length <= b.base || b.last() + b.length <= a.base) return false;

  if (a.stride == b.stride || a.count == 1 || b.count == 1) {
    // x - y = d + k * stride for every k in [k_min, k_max].
    const int64_t stride = std::max(a.stride, b.stride);
    const int64_t d = a.base - b.base;
    if (stride == 0) return -a.length < d && d < b.length;
    const int64_t k_min = -(b.stride != 0 ? b.count - 1 : 0);
    const int64_t k_max = a.stride != 0 ? a.count - 1 : 0;
    const int64_t first = std::max(k_min, floor_div(-a.length - d, stride) + 1);
    return first <= k_max && d + first * stride < b.length;
  }

  // Which i put segment i of `a` where `b` reaches at all.
  const int64_t low = b.base - a.length + 1;
  const int64_t high = b.last() + b.length - 1;
  const int64_t i0 = std::max<int64_t>(0, ceil_div(low - a.base, a.stride));
  const int64_t i1 = std::min(a.count - 1, floor_div(high - a.base, a.stride));
  if (i0 > i1) return false;
  // There, segment i meets a segment of `b` exactly when x - b.base, modulo b.stride, lies in
  // (-a.length, b.length): at the ends of the reach the first or last segment is met anyway.
  const Wide m = b.stride;
  if (b.length + a.length - 1 >= m) return true;  // every residue meets
  const Wide step = a.stride % m;
  const Wide offset =
      (static_cast<Wide>(a.base) + static_cast<Wide>(i0) * a.stride - b.base + a.length - 1) %
      m;                                // residue shifted so that the window is
  const Wide start = (offset + m) % m;  // [0, a.length + b.length - 2]
  const Wide width = a.length + b.length - 2;
  if (start <= width) return true;
  // (start + step * x) mod m in [0, width]  <=>  (step * x) mod m in [m - start, m - start +
  // width], which does not wrap because start > width.
  const Wide x = first_in_window(step, m, m - start, m - start + width);
  return x >= 0 && x <= i1 - i0;
}

// Which dimension to walk: the shorter one; the other becomes the sequence.
int shorter_dimension(const Region& region) { return region.count[0] < region.count[1] ? 0 : 1; }

}  // namespace

bool overlap(const Region& a, const Region& b) {
  if (a.end <= b.base || b.end <= a.base) [[likely]]
    return false;
  const int walk_a = shorter_dimension(a);
  const int walk_b = shorter_dimension(b);
  const auto sequence = [](const Region& r, int walk, int64_t step) {
    return Sequence{static_cast<int64_t>(r.base) + step * r.stride[walk], r.count[1 - walk],
                    r.stride[1 - walk], r.length};
  };
  // A stride of 0 repeats the same segments, so one step of it is enough.
  const int64_t steps_a = a.stride[walk_a] == 0 ? 1 : a.count[walk_a];
  const int64_t steps_b = b.stride[walk_b] == 0 ? 1 : b.count[walk_b];
  for (int64_t i = 0; i < steps_a; ++i) {
    for (int64_t j = 0; j < steps_b; ++j) {
      if (sequences_overlap(sequence(a, walk_a, i), sequence(b, walk_b, j))) return true;
    }
  }
  return false;
}

bool overlaps_itself(const Region& region) {
  const int walk = shorter_dimension(region);
  const int64_t count = region.count[1 - walk];
  const int64_t stride = region.stride[1 - walk];
  const int64_t step = region.stride[walk];
  if (count > 1 && stride < region.length) return true;
  if (region.count[walk] > 1 && step < region.length) return true;
  const int64_t reach = (count - 1) * stride + region.length;
  if (region.count[walk] == 1 || step >= reach) return false;
  if (stride >= (region.count[walk] - 1) * step + region.length) return false;
  // Lines that are k steps apart are translates of each other.
  const Sequence line{0, count, stride, region.length};
  for (int64_t k = 1; k < region.count[walk]; ++k) {
    if (k * step >= reach) break;
    if (sequences_overlap(line, {k * step, count, stride, region.length})) return true;
  }
  return false;
}

}  // namespace attnres
