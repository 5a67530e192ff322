// SPDX-License-Identifier: Apache-2.0
#include "two_phase_registry.hpp"

#include <algorithm>
#include <array>

#include "attnres/attnres.h"

namespace attnres {
namespace {

template <int H, int B, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
constexpr MergeEntry merge_ring() {
  return {ATTNRES_KERNEL_RING,
          H,
          B,
          0,
          FLOAT_BANK,
          HAS_OUTPUT_NORM,
          STATIC_COMMON_PATH,
          &MergeRingInstance<H, B, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kernel};
}

template <int H, int CLUSTER, bool FLOAT_BANK, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
constexpr MergeEntry merge_cluster() {
  return {
      ATTNRES_KERNEL_CLUSTER,
      H,
      1,
      CLUSTER,
      FLOAT_BANK,
      HAS_OUTPUT_NORM,
      STATIC_COMMON_PATH,
      &MergeClusterInstance<H, CLUSTER, FLOAT_BANK, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kernel};
}

#define ATTNRES_MERGE_RING(H, B, FLOAT_BANK, NORM, STATIC) \
  merge_ring<H, B, FLOAT_BANK, NORM, STATIC>(),
#define ATTNRES_MERGE_CLUSTER(H, CLUSTER, FLOAT_BANK, NORM, STATIC) \
  merge_cluster<H, CLUSTER, FLOAT_BANK, NORM, STATIC>(),
#define ATTNRES_BANK(...)
#define ATTNRES_BANK_FLOOR(...)
constexpr auto kMerges = std::to_array<MergeEntry>({
#include "two_phase.inc"
});
#undef ATTNRES_MERGE_RING
#undef ATTNRES_MERGE_CLUSTER
#undef ATTNRES_BANK

#define ATTNRES_MERGE_RING(...)
#define ATTNRES_MERGE_CLUSTER(...)
#define ATTNRES_BANK(H, FLOAT_BANK) BankEntry{H, FLOAT_BANK, &BankInstance<H, FLOAT_BANK>::kernel},
constexpr auto kBanks = std::to_array<BankEntry>({
#include "two_phase.inc"
});
#undef ATTNRES_BANK
#undef ATTNRES_BANK_FLOOR

#define ATTNRES_BANK(...)
#define ATTNRES_BANK_FLOOR(H, FLOAT_BANK) \
  BankFloorEntry{H, FLOAT_BANK, &BankFloorInstance<H, FLOAT_BANK>::launch},
constexpr auto kBankFloors = std::to_array<BankFloorEntry>({
#include "two_phase.inc"
});
#undef ATTNRES_MERGE_RING
#undef ATTNRES_MERGE_CLUSTER
#undef ATTNRES_BANK
#undef ATTNRES_BANK_FLOOR

template <typename Entries>
auto find(const Entries& entries, int64_t hidden_size, bool float32_bank) -> decltype(&entries[0]) {
  for (const auto& entry : entries) {
    if (entry.hidden_size == hidden_size && entry.float32_bank == float32_bank) return &entry;
  }
  return nullptr;
}

}  // namespace

bool MergeEntry::serves(const MergeEntry& wanted) const {
  return kernel == wanted.kernel && hidden_size == wanted.hidden_size &&
         prefixes_per_row == wanted.prefixes_per_row && cluster_size == wanted.cluster_size &&
         float32_bank == wanted.float32_bank && has_output_norm == wanted.has_output_norm &&
         static_common_path == wanted.static_common_path;
}

std::span<const MergeEntry> merge_kernels() { return kMerges; }
std::span<const BankEntry> bank_kernels() { return kBanks; }

const MergeEntry* find_merge(const MergeEntry& wanted) {
  const auto found = std::find_if(kMerges.begin(), kMerges.end(),
                                  [&](const MergeEntry& entry) { return entry.serves(wanted); });
  return found != kMerges.end() ? &*found : nullptr;
}

const BankEntry* find_bank(int64_t hidden_size, bool float32_bank) {
  return find(kBanks, hidden_size, float32_bank);
}

const BankFloorEntry* find_bank_floor(int64_t hidden_size, bool float32_bank) {
  return find(kBankFloors, hidden_size, float32_bank);
}

}  // namespace attnres
