// SPDX-License-Identifier: Apache-2.0
// Tuning of the cluster kernel as data. For which batches it runs is the plan's, in
// cpp/src/plan_table.hpp.
#pragma once

namespace attnres {

template <int H, int N, int CLUSTER>
struct ClusterPolicy {
  // One 16-byte vector a thread: every load of a token is in flight at once.
  static constexpr int kElementsPerThread = 8;
};

}  // namespace attnres
