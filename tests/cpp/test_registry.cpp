// SPDX-License-Identifier: Apache-2.0
// Which compiled object a GPU gets, and that a permutation is found by exactly its parameters. The registry is
// compiled in with a table of its own, so neither kernels nor a GPU are needed; built once with every target
// and once, ATTNRES_TEST_WITHOUT_100A, as a library that lacks one.
#include <string>

#include "fake_two_phase.hpp"
#include "registry.hpp"
#include "test_runner.hpp"
#include "two_phase_registry.hpp"

namespace attnres {

// What the kernels' own object files define.
template <int H, int N, int NC, int B, bool NORM, bool STATIC>
const uint32_t RingInstance<H, N, NC, B, NORM, STATIC>::kBlockSize = 256;
template <int H, int N, int NC, int B, bool NORM, bool STATIC>
const uint32_t RingInstance<H, N, NC, B, NORM, STATIC>::kMaxCtasPerSm = NC;
template <int H, int N, int NC, int B, bool NORM, bool STATIC>
const uint32_t RingInstance<H, N, NC, B, NORM, STATIC>::kMaxRingRows = 8;
template <int H, int N, int NC, int B, bool NORM, bool STATIC>
const uint32_t RingInstance<H, N, NC, B, NORM, STATIC>::kFixedSharedMemory = 1024;
template <int H, int N, int NC, int B, bool NORM, bool STATIC>
cudaError_t RingInstance<H, N, NC, B, NORM, STATIC>::launch(const ForwardParams&,
                                                            const LaunchShape&, cudaStream_t) {
  return cudaErrorNotSupported;
}
template <int H, int N, int NC, int B, bool NORM, bool STATIC>
const void* RingInstance<H, N, NC, B, NORM, STATIC>::function() {
  return &kBlockSize;
}
template <int H, int N, int CLUSTER, bool NORM, bool STATIC>
const uint32_t ClusterInstance<H, N, CLUSTER, NORM, STATIC>::kBlockSize = 128;
template <int H, int N, int CLUSTER, bool NORM, bool STATIC>
cudaError_t ClusterInstance<H, N, CLUSTER, NORM, STATIC>::launch(const ForwardParams&,
                                                                 const LaunchShape&, cudaStream_t) {
  return cudaErrorNotSupported;
}
template <int H, int N, int CLUSTER, bool NORM, bool STATIC>
const void* ClusterInstance<H, N, CLUSTER, NORM, STATIC>::function() {
  return &kBlockSize;
}
template <int H, int N>
cudaError_t FloorInstance<H, N>::launch(const ForwardParams&, int, bool, cudaStream_t) {
  return cudaErrorNotSupported;
}

#define ATTNRES_RING(...) template struct RingInstance<__VA_ARGS__>;
#define ATTNRES_CLUSTER(...) template struct ClusterInstance<__VA_ARGS__>;
#define ATTNRES_FLOOR(...) template struct FloorInstance<__VA_ARGS__>;
#include "registry.inc"

}  // namespace attnres

using namespace attnres;

namespace {

#ifdef ATTNRES_TEST_WITHOUT_100A
constexpr bool kHas100a = false;
#else
constexpr bool kHas100a = true;
#endif

std::string resolved(int compute_major, int compute_minor) {
  const char* target = target_for(compute_major, compute_minor);
  return target == nullptr ? "none" : target;
}

}  // namespace

TEST_CASE(each_supported_gpu_gets_the_object_of_exactly_its_capability) {
  EXPECT_EQ(resolved(9, 0), "90a");
  EXPECT_EQ(resolved(10, 3), "103a");
  // An object that was not built is not replaced by a neighbour's: 103a does not run on 10.0.
  EXPECT_EQ(resolved(10, 0), kHas100a ? "100a" : "none");
}

TEST_CASE(unknown_gpus_get_none) {
  // Older, within a supported family, the next families, and nonsense.
  for (const auto& [major, minor] : {std::pair{7, 5},
                                     {8, 0},
                                     {8, 9},
                                     {9, 1},
                                     {10, 1},
                                     {10, 2},
                                     {11, 0},
                                     {12, 0},
                                     {12, 1},
                                     {13, 0},
                                     {0, 0},
                                     {-1, -1},
                                     {90, 0}}) {
    EXPECT_EQ(resolved(major, minor), "none");
  }
}

TEST_CASE(built_targets_are_listed_as_they_were_asked_for) {
  EXPECT_EQ(std::string(built_targets()), kHas100a ? "90a;100a;103a" : "90a;103a");
}

TEST_CASE(permutation_is_found_by_exactly_its_parameters) {
  EXPECT_EQ(instances().size(), size_t{4});
  for (const Instance& instance : instances()) {
    EXPECT(find_instance(instance.permutation) == &instance);
    for (int32_t attnres_permutation::* field :
         {&attnres_permutation::kernel, &attnres_permutation::hidden_size,
          &attnres_permutation::num_sources, &attnres_permutation::rows_per_stage,
          &attnres_permutation::prefixes_per_row, &attnres_permutation::cluster_size}) {
      attnres_permutation other = instance.permutation;
      other.*field += 8;
      EXPECT(find_instance(other) == nullptr);
    }
  }
}

TEST_CASE(floor_is_found_by_its_sizes) {
  EXPECT(find_floor(7168, 2) != nullptr);
  EXPECT(find_floor(7168, 3) == nullptr);
  EXPECT(find_floor(4096, 2) == nullptr);
}

TEST_CASE(merge_is_found_by_exactly_its_parameters) {
  EXPECT_EQ(merge_kernels().size(), size_t{4});
  for (const MergeEntry& entry : merge_kernels()) {
    EXPECT(find_merge(entry) == &entry);
    for (int32_t MergeEntry::* field : {&MergeEntry::kernel, &MergeEntry::hidden_size,
                                        &MergeEntry::prefixes_per_row, &MergeEntry::cluster_size}) {
      MergeEntry other = entry;
      other.*field += 8;
      EXPECT(find_merge(other) == nullptr);
    }
    // No two lines of the table differ in one flag alone.
    for (bool MergeEntry::* flag : {&MergeEntry::float32_bank, &MergeEntry::has_output_norm,
                                    &MergeEntry::static_common_path}) {
      MergeEntry other = entry;
      other.*flag = !(other.*flag);
      EXPECT(find_merge(other) == nullptr);
    }
  }
}

TEST_CASE(merge_is_found_as_the_kernel_of_its_line) {
  const MergeEntry ring = {ATTNRES_KERNEL_RING, 7168, 2, 0, true, true, true, nullptr};
  EXPECT(find_merge(ring)->get().function == (&idle_merge<0, 7168, 2, true, true, true>));
  const MergeEntry cluster = {ATTNRES_KERNEL_CLUSTER, 7168, 1, 7, true, true, true, nullptr};
  EXPECT(find_merge(cluster)->get().function == (&idle_merge<1, 7168, 7, true, true, true>));
}

TEST_CASE(bank_kernels_are_found_by_their_size_and_type) {
  EXPECT_EQ(bank_kernels().size(), size_t{2});
  EXPECT(find_bank(7168, false)->get().function == (&idle_bank<7168, false>));
  EXPECT(find_bank(7168, true)->get().function == (&idle_bank<7168, true>));
  EXPECT(find_bank(4096, false) == nullptr);
  EXPECT(find_bank(int64_t{7168} + (int64_t{1} << 32), false) == nullptr);
  EXPECT(find_bank_floor(7168, true) != nullptr);
  EXPECT(find_bank_floor(7168, false) == nullptr);
  EXPECT(find_bank_floor(4096, true) == nullptr);
}
