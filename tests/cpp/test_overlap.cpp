// SPDX-License-Identifier: Apache-2.0
// The overlap test against a map of every byte, over random strided regions.
#include <algorithm>
#include <random>

#include "overlap.hpp"
#include "test_runner.hpp"

namespace {

using attnres::Region;

constexpr int kBytes = 4096;

Region make_region(uintptr_t base, int64_t count0, int64_t stride0, int64_t count1, int64_t stride1,
                   int64_t length) {
  if (count0 == 1) stride0 = 0;
  if (count1 == 1) stride1 = 0;
  const auto reach =
      static_cast<uintptr_t>((count0 - 1) * stride0 + (count1 - 1) * stride1 + length);
  return {base, base + reach, {count0, count1}, {stride0, stride1}, length};
}

// How many segments cover each byte.
std::vector<int> cover(const Region& r) {
  std::vector<int> bytes(kBytes, 0);
  for (int64_t i = 0; i < r.count[0]; ++i) {
    for (int64_t j = 0; j < r.count[1]; ++j) {
      const int64_t begin = static_cast<int64_t>(r.base) + i * r.stride[0] + j * r.stride[1];
      for (int64_t byte = begin; byte < begin + r.length; ++byte) ++bytes.at(byte);
    }
  }
  return bytes;
}

Region random_region(std::mt19937& random) {
  const auto upto = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (;;) {
    const Region r =
        make_region(upto(1, 300), upto(1, 12), upto(0, 120), upto(1, 6), upto(0, 60), upto(1, 9));
    if (r.end <= kBytes) return r;
  }
}

}  // namespace

TEST_CASE(random_regions_agree_with_a_map_of_their_bytes) {
  std::mt19937 random(3);
  int shared_count = 0;
  for (int i = 0; i < 60000; ++i) {
    const Region a = random_region(random), b = random_region(random);
    const std::vector<int> in_a = cover(a), in_b = cover(b);
    bool shared = false;
    for (int byte = 0; byte < kBytes; ++byte) shared |= in_a[byte] > 0 && in_b[byte] > 0;
    shared_count += shared;
    EXPECT_EQ(attnres::overlap(a, b), shared);
    EXPECT_EQ(attnres::overlap(b, a), shared);
    const bool repeated = std::any_of(in_a.begin(), in_a.end(), [](int n) { return n > 1; });
    EXPECT_EQ(attnres::overlaps_itself(a), repeated);
    if (test_runner::failures_in_case > 0) return;
  }
  EXPECT(shared_count > 10000 && shared_count < 55000);  // both answers were asked for
}

TEST_CASE(single_sequences_with_coprime_strides_agree) {
  // Long sequences that reach the modular search, sparse enough that many pairs do not meet.
  std::mt19937 random(5);
  const auto upto = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  int shared_count = 0;
  constexpr int kPairs = 60000;
  for (int i = 0; i < kPairs; ++i) {
    const Region a = make_region(upto(1, 200), upto(2, 30), upto(20, 120), 1, 0, upto(1, 3));
    const Region b = make_region(upto(1, 200), upto(2, 30), upto(20, 120), 1, 0, upto(1, 3));
    const std::vector<int> in_a = cover(a), in_b = cover(b);
    bool shared = false;
    for (int byte = 0; byte < kBytes; ++byte) shared |= in_a[byte] > 0 && in_b[byte] > 0;
    shared_count += shared;
    EXPECT_EQ(attnres::overlap(a, b), shared);
    if (test_runner::failures_in_case > 0) return;
  }
  EXPECT(shared_count > kPairs / 10 && shared_count < kPairs * 9 / 10);
}

TEST_CASE(sizes_beyond_32_bits_are_answered_exactly) {
  // 2^40 tokens: the gap between two of the first view's is filled exactly, or by one byte too
  // many.
  const int64_t count = int64_t{1} << 40;
  const Region a = make_region(4096, count, 1000, 1, 0, 10);
  EXPECT(!attnres::overlap(a, make_region(4096 + 10, count, 1000, 1, 0, 990)));
  EXPECT(attnres::overlap(a, make_region(4096 + 10, count, 1000, 1, 0, 991)));
  // Strides 1000 and 1001 drift by one byte a token: token 11 of one reaches back to token 11 of
  // the other.
  EXPECT(attnres::overlap(a, make_region(4096 + 10, count, 1001, 1, 0, 989)));
  EXPECT(!attnres::overlap(a, make_region(4096 + 10, 10, 1001, 1, 0, 980)));
}
