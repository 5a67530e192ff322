// SPDX-License-Identifier: Apache-2.0
#include "plan_choice.hpp"

#include "error.hpp"

namespace attnres {
namespace {

void require_consistent_overrides(const attnres_forward_args& args) {
  const bool names_ring_column =
      args.rows_per_stage != 0 || args.ctas_per_sm != 0 || args.rows_in_flight != 0;
  if (args.kernel == ATTNRES_KERNEL_CLUSTER && names_ring_column) {
    fail(ATTNRES_UNSUPPORTED,
         "kernel: expected the ring kernel with rows_per_stage, ctas_per_sm or rows_in_flight, got "
         "the cluster kernel");
  }
  if (args.cluster_size != 0 && (args.kernel == ATTNRES_KERNEL_RING || names_ring_column)) {
    fail(ATTNRES_UNSUPPORTED,
         "kernel: expected the cluster kernel with cluster_size, got the ring kernel");
  }
}

PlanRow table_row(const attnres_forward_args& args, std::span<const PlanRow> table, int num_sms,
                  bool wants_cluster) {
  const int64_t entries = args.num_bank_tokens;
  const double entries_per_sm = static_cast<double>(entries) / num_sms;
  const int num_sources = args.num_blocks + 1;
  const bool wants_ring = args.kernel == ATTNRES_KERNEL_RING || args.rows_per_stage != 0 ||
                          args.ctas_per_sm != 0 || args.rows_in_flight != 0 ||
                          args.num_tokens > entries;
  const Reads reads = args.pdl == ATTNRES_PDL_EARLY ? Reads::kEarly : Reads::kAfterWait;
  // A batch beyond every row of the kernel that was asked for takes that kernel's last row.
  PlanRow row = wants_cluster ? cluster_row(Reads::kAny, kMaxSources, kUnbounded, 2)
                              : ring_row(Reads::kAny, kMaxSources, kUnbounded, 2, 2);
  for (const PlanRow& candidate : table) {
    const bool serves = (candidate.reads == Reads::kAny || candidate.reads == reads) &&
                        num_sources <= candidate.max_sources &&
                        (candidate.kernel == ATTNRES_KERNEL_RING ? !wants_cluster : !wants_ring);
    if (!serves) continue;
    row = candidate;
    if (entries_per_sm <= candidate.max_entries_per_sm) break;
  }
  return row;
}

PlanRow batch_invariant_row(const attnres_forward_args& args, std::span<const PlanRow> table,
                            int num_sms, bool wants_cluster) {
  if (!wants_cluster) {
    const BatchInvariantRow* row = kBatchInvariantPlan;
    while (args.num_blocks + 1 > row->max_sources) ++row;
    return ring_row(Reads::kAny, row->max_sources, kUnbounded, row->rows_per_stage,
                    args.num_bank_tokens > num_sms ? row->max_ctas_per_sm : 1,
                    table_row(args, table, num_sms, false).rows_in_flight);
  }
  if (args.cluster_size == 0) {
    fail(ATTNRES_UNSUPPORTED,
         "cluster_size: expected one with the cluster kernel in a batch-invariant call, got 0");
  }
  return cluster_row(Reads::kAny, kMaxSources, kUnbounded, args.cluster_size);
}

}  // namespace

std::span<const PlanRow> builtin_plan(int compute_major, bool shares_entries) {
  if (compute_major >= 10) return kBlackwellPlan;
  if (shares_entries) return kHopperSharedPlan;
  return kHopperPlan;
}

std::span<const PlanRow> builtin_merge_plan() { return kMergePlan; }

PlanRow choose_row(const attnres_forward_args& args, std::span<const PlanRow> table, int num_sms) {
  require_consistent_overrides(args);
  const bool wants_cluster = args.kernel == ATTNRES_KERNEL_CLUSTER || args.cluster_size != 0;
  PlanRow row = args.batch_invariant > 0 ? batch_invariant_row(args, table, num_sms, wants_cluster)
                                         : table_row(args, table, num_sms, wants_cluster);
  if (args.rows_per_stage != 0) row.rows_per_stage = args.rows_per_stage;
  if (args.cluster_size != 0) row.cluster_size = args.cluster_size;
  if (args.ctas_per_sm != 0) row.ctas_per_sm = args.ctas_per_sm;
  if (args.rows_in_flight != 0) row.rows_in_flight = args.rows_in_flight;
  return row;
}

}  // namespace attnres
