// SPDX-License-Identifier: Apache-2.0
// Which entries and which sites of a bank pass a cluster has. Plain arithmetic, for the kernel and for the host side.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "two_phase.hpp"

namespace attnres {

// Clusters take groups in turn, so that all of them work on neighbouring rows at any time; what is left for the
// last round is dealt out evenly.
struct BankShare {
  int32_t range, ranges;  // of clusters that share the entries
  int32_t num_tokens;
  int32_t entries;       // of a group
  int32_t rounds;        // with whole groups for all
  int32_t last_entries;  // of a group in the round after them
  int32_t site, sites;   // the first, and how many

  __host__ __device__ __forceinline__ BankShare(const BankParams& params, int32_t cluster,
                                                int32_t num_clusters)
      : num_tokens(params.num_tokens), entries(params.entries_per_group) {
    const int32_t part = cluster % params.parts;
    range = cluster / params.parts;
    ranges = num_clusters / params.parts;
    rounds = num_tokens / (ranges * entries);
    last_entries = (num_tokens - rounds * ranges * entries + ranges - 1) / ranges;
    site = part * params.sites_per_part;
    sites = smaller(params.sites_per_part, params.num_sites - site);
  }

  struct Group {
    int32_t token, entries;
  };
  // False when there is none in this round, nor in a later one.
  __host__ __device__ __forceinline__ bool group_of(int32_t round, Group& group) const {
    group.entries = round < rounds ? entries : last_entries;
    group.token = round * ranges * entries + range * group.entries;
    group.entries = smaller(group.entries, num_tokens - group.token);
    return round <= rounds && group.entries > 0;
  }

  // Pairs of an entry and a site, entry by entry, of which each block of the cluster weighs as many.
  __host__ __device__ __forceinline__ int32_t pairs_per_block() const {
    return entries * kBankSitesPerPart / kBankClusterSize;
  }

 private:
  static __host__ __device__ __forceinline__ int32_t smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
  }
};

}  // namespace attnres
