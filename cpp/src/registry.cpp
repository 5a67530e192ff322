// SPDX-License-Identifier: Apache-2.0
#include "registry.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace attnres {
namespace {

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
constexpr Instance ring_instance() {
  using Ring = RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>;
  return {.permutation = {.struct_size = sizeof(attnres_permutation),
                          .kernel = ATTNRES_KERNEL_RING,
                          .hidden_size = H,
                          .num_sources = N,
                          .rows_per_stage = NC,
                          .prefixes_per_row = B,
                          .cluster_size = 0,
                          .has_output_norm = HAS_OUTPUT_NORM,
                          .static_common_path = STATIC_COMMON_PATH},
          .function = &Ring::function,
          .launch = &Ring::launch,
          .block_size = &Ring::kBlockSize,
          .max_ctas_per_sm = &Ring::kMaxCtasPerSm,
          .max_ring_rows = &Ring::kMaxRingRows,
          .fixed_shared_memory = &Ring::kFixedSharedMemory};
}

template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
constexpr Instance cluster_instance() {
  using Cluster = ClusterInstance<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>;
  return {.permutation = {.struct_size = sizeof(attnres_permutation),
                          .kernel = ATTNRES_KERNEL_CLUSTER,
                          .hidden_size = H,
                          .num_sources = N,
                          .rows_per_stage = 0,
                          .prefixes_per_row = 1,
                          .cluster_size = CLUSTER,
                          .has_output_norm = HAS_OUTPUT_NORM,
                          .static_common_path = STATIC_COMMON_PATH},
          .function = &Cluster::function,
          .launch = &Cluster::launch,
          .block_size = &Cluster::kBlockSize,
          .max_ctas_per_sm = nullptr,
          .max_ring_rows = nullptr,
          .fixed_shared_memory = nullptr};
}

#define ATTNRES_RING(H, N, NC, B, NORM, STATIC) ring_instance<H, N, NC, B, NORM, STATIC>(),
#define ATTNRES_CLUSTER(H, N, CLUSTER, NORM, STATIC) \
  cluster_instance<H, N, CLUSTER, NORM, STATIC>(),
#define ATTNRES_FLOOR(...)
constexpr auto kInstances = std::to_array<Instance>({
#include "registry.inc"
});
#undef ATTNRES_RING
#undef ATTNRES_CLUSTER
#undef ATTNRES_FLOOR

#define ATTNRES_RING(...)
#define ATTNRES_CLUSTER(...)
#define ATTNRES_FLOOR(H, N) FloorEntry{H, N, &FloorInstance<H, N>::launch},
constexpr auto kFloors = std::to_array<FloorEntry>({
#include "registry.inc"
});
#undef ATTNRES_RING
#undef ATTNRES_CLUSTER
#undef ATTNRES_FLOOR

constexpr std::string_view kBuiltTargets =
#include "built_targets.inc"
    ;

constexpr uint64_t key(const attnres_permutation& p) {
  uint64_t key = static_cast<uint64_t>(p.hidden_size);
  for (const int32_t field :
       {p.kernel, p.num_sources, p.rows_per_stage, p.prefixes_per_row, p.cluster_size}) {
    key = key << 5 | static_cast<uint64_t>(field & 31);
  }
  return key << 2 | static_cast<uint64_t>(p.has_output_norm << 1 | p.static_common_path);
}

// (key, index into kInstances), by key.
constexpr auto kIndex = [] {
  std::array<std::pair<uint64_t, size_t>, kInstances.size()> index{};
  for (size_t i = 0; i < kInstances.size(); ++i) index[i] = {key(kInstances[i].permutation), i};
  std::sort(index.begin(), index.end());
  return index;
}();
static_assert(std::adjacent_find(kIndex.begin(), kIndex.end(),
                                 [](auto& a, auto& b) { return a.first == b.first; }) ==
                  kIndex.end(),
              "cuda/instances.cmake names a permutation twice");

struct Target {
  const char* name;
  int compute_major, compute_minor;
};
constexpr Target kTargets[] = {{"90a", 9, 0}, {"100a", 10, 0}, {"103a", 10, 3}};

constexpr bool is_built(std::string_view target) {
  for (std::string_view rest = kBuiltTargets; !rest.empty();) {
    const size_t end = std::min(rest.find(';'), rest.size());
    if (rest.substr(0, end) == target) return true;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return false;
}

}  // namespace

std::span<const Instance> instances() { return kInstances; }

const Instance* find_instance(const attnres_permutation& permutation) {
  const uint64_t wanted = key(permutation);
  const auto found = std::lower_bound(kIndex.begin(), kIndex.end(), wanted,
                                      [](auto& entry, uint64_t k) { return entry.first < k; });
  return found != kIndex.end() && found->first == wanted ? &kInstances[found->second] : nullptr;
}

const FloorEntry* find_floor(int64_t hidden_size, int num_sources) {
  for (const FloorEntry& floor : kFloors) {
    if (floor.hidden_size == hidden_size && floor.num_sources == num_sources) return &floor;
  }
  return nullptr;
}

const char* built_targets() { return kBuiltTargets.data(); }

const char* target_for(int compute_major, int compute_minor) {
  for (const Target& target : kTargets) {
    if (target.compute_major == compute_major && target.compute_minor == compute_minor &&
        is_built(target.name)) {
      return target.name;
    }
  }
  return nullptr;
}

}  // namespace attnres
