// SPDX-License-Identifier: Apache-2.0
// Which row of the plan serves a call, and that a batch-invariant call's kernel does not follow from its batch.
#include <algorithm>
#include <utility>

#include "error.hpp"
#include "plan_choice.hpp"
#include "test_runner.hpp"

using namespace attnres;

namespace {

constexpr PlanRow kTable[] = {
    cluster_row(Reads::kAfterWait, 3, 0.5, 7),  // few sources
    cluster_row(Reads::kAfterWait, 9, 0.25, 4), ring_row(Reads::kEarly, 9, 0.5, 3, 1),
    ring_row(Reads::kAny, 5, kUnbounded, 1, 2), ring_row(Reads::kAny, 9, kUnbounded, 2, 2),
};
constexpr int kSms = 100;

attnres_forward_args call(int64_t entries, int num_blocks, int pdl = ATTNRES_PDL_WAIT) {
  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  args.num_tokens = args.num_bank_tokens = entries;
  args.num_blocks = num_blocks;
  args.pdl = pdl;
  return args;
}

PlanRow choose(const attnres_forward_args& args) { return choose_row(args, kTable, kSms); }

std::string refusal(const attnres_forward_args& args) {
  try {
    choose(args);
  } catch (const Error& error) {
    EXPECT_EQ(error.status, ATTNRES_UNSUPPORTED);
    return error.message;
  }
  return "accepted";
}

bool same_kernel(const PlanRow& a, const PlanRow& b) {
  return a.kernel == b.kernel && a.rows_per_stage == b.rows_per_stage &&
         a.cluster_size == b.cluster_size;
}

}  // namespace

TEST_CASE(first_row_whose_bounds_hold_is_taken) {
  EXPECT(choose(call(50, 2)) == kTable[0]);
  EXPECT(choose(call(51, 2)) == kTable[3]);  // past every cluster row
  EXPECT(choose(call(25, 3)) == kTable[1]);  // four sources
  EXPECT(choose(call(26, 8)) == kTable[4]);
  EXPECT(choose(call(25, 8, ATTNRES_PDL_OFF)) == kTable[1]);
  EXPECT(choose(call(50, 8, ATTNRES_PDL_EARLY)) == kTable[2]);
  EXPECT(choose(call(51, 4, ATTNRES_PDL_EARLY)) == kTable[3]);
  EXPECT(choose(call(100000, 8, ATTNRES_PDL_EARLY)) == kTable[4]);
}

TEST_CASE(overrides_choose_the_kernel_and_replace_columns) {
  attnres_forward_args args = call(1, 8);
  args.kernel = ATTNRES_KERNEL_RING;
  EXPECT(choose(args) == kTable[4]);
  args.rows_per_stage = 1;
  args.ctas_per_sm = 1;
  EXPECT(choose(args) == ring_row(Reads::kAny, 9, kUnbounded, 1, 1));
  args = call(100000, 8);
  args.cluster_size = 2;
  EXPECT(same_kernel(choose(args), cluster_row(Reads::kAny, 9, kUnbounded, 2)));
  // No row at all for the cluster kernel.
  args = call(1, 8, ATTNRES_PDL_EARLY);
  args.kernel = ATTNRES_KERNEL_CLUSTER;
  EXPECT_EQ(choose(args).kernel, ATTNRES_KERNEL_CLUSTER);
  args.rows_per_stage = 2;
  EXPECT(refusal(args).find("kernel: expected the ring kernel") == 0);
  args.rows_per_stage = 0;
  args.kernel = ATTNRES_KERNEL_RING;
  args.cluster_size = 2;
  EXPECT(refusal(args).find("kernel: expected the cluster kernel") == 0);
}

TEST_CASE(rows_in_flight_come_from_the_row_or_the_call) {
  constexpr PlanRow kDeep[] = {ring_row(Reads::kAny, 9, 1.0, 3, 1),
                               ring_row(Reads::kAny, 9, kUnbounded, 2, 2, 6)};
  attnres_forward_args args = call(101, 2);
  EXPECT_EQ(choose_row(args, kDeep, kSms).rows_in_flight, 6);
  args.batch_invariant = 1;
  EXPECT_EQ(choose_row(args, kDeep, kSms).rows_in_flight, 6);
  args.batch_invariant = 0;
  args.rows_in_flight = 8;
  EXPECT_EQ(choose_row(args, kDeep, kSms).rows_in_flight, 8);
  EXPECT_EQ(choose_row(call(100, 2), kDeep, kSms).rows_in_flight, 0);
  args = call(1, 2);
  args.rows_in_flight = 8;  // a column of the ring kernel, which is then the one that is meant
  EXPECT(choose(args) == ring_row(Reads::kAny, 5, kUnbounded, 1, 2, 8));
  args.cluster_size = 2;
  EXPECT(refusal(args).find("kernel: expected the cluster kernel") == 0);
}

TEST_CASE(tokens_that_share_a_bank_entry_take_the_ring_kernel) {
  attnres_forward_args args = call(1, 2);
  args.num_tokens = 2;
  EXPECT(choose(args) == kTable[3]);
}

TEST_CASE(batch_invariant_kernel_does_not_follow_from_the_batch) {
  for (int num_blocks = 0; num_blocks <= 8; ++num_blocks) {
    attnres_forward_args first = call(1, num_blocks);
    first.batch_invariant = 1;
    const PlanRow wanted = choose(first);
    for (const int64_t entries : {2, 25, 26, 50, 51, 100, 101, 8192, 1 << 30}) {
      for (const int pdl : {ATTNRES_PDL_WAIT, ATTNRES_PDL_EARLY, ATTNRES_PDL_OFF}) {
        for (const int sms : {1, 78, 132, 148}) {
          for (const int prefixes : {1, 2}) {
            attnres_forward_args args = call(entries, num_blocks, pdl);
            args.num_tokens *= prefixes;
            args.batch_invariant = 1;
            EXPECT(same_kernel(choose_row(args, kTable, sms), wanted));
            EXPECT(same_kernel(choose_row(args, builtin_plan(10, prefixes > 1), sms), wanted));
          }
        }
      }
    }
  }
  for (const int num_blocks : {0, 5, 6, 8}) {
    attnres_forward_args args = call(101, num_blocks);
    args.batch_invariant = 1;
    EXPECT_EQ(choose(args).kernel, ATTNRES_KERNEL_RING);
    EXPECT_EQ(choose(args).rows_per_stage, num_blocks <= 5 ? 2 : 3);
    EXPECT_EQ(choose(args).ctas_per_sm, num_blocks <= 5 ? 2 : 1);
    args.num_tokens = args.num_bank_tokens = 100;
    EXPECT_EQ(choose(args).ctas_per_sm, 1);
  }
  // -1 is the answer of the environment's default, and of a caller who says no.
  attnres_forward_args args = call(1, 8);
  args.batch_invariant = -1;
  EXPECT(choose(args) == kTable[1]);
}

TEST_CASE(batch_invariant_override_must_name_the_kernel_in_full) {
  for (const int64_t entries : {1, 5000}) {
    attnres_forward_args args = call(entries, 8);
    args.batch_invariant = 1;
    args.rows_per_stage = 3;
    EXPECT_EQ(choose(args).rows_per_stage, 3);
    args.ctas_per_sm = 1;
    EXPECT_EQ(choose(args).ctas_per_sm, 1);
    args = call(entries, 8);
    args.batch_invariant = 1;
    args.kernel = ATTNRES_KERNEL_CLUSTER;
    EXPECT_EQ(refusal(args),
              "cluster_size: expected one with the cluster kernel in a batch-invariant call, got "
              "0");
    args.cluster_size = 4;
    EXPECT(same_kernel(choose(args), cluster_row(Reads::kAny, 9, kUnbounded, 4)));
  }
}

TEST_CASE(builtin_tables_serve_every_call_and_go_up) {
  for (const std::span<const PlanRow> table :
       {builtin_plan(9, false), builtin_plan(9, true), builtin_plan(10, false),
        builtin_plan(10, true), builtin_merge_plan()}) {
    EXPECT(table.back().reads == Reads::kAny);
    EXPECT_EQ(table.back().max_sources, kMaxSources);
    EXPECT_EQ(table.back().max_entries_per_sm, kUnbounded);
    EXPECT_EQ(table.back().kernel, ATTNRES_KERNEL_RING);
    for (const PlanRow& row : table) {
      EXPECT(row.max_sources >= 1 && row.max_sources <= kMaxSources);
      EXPECT_EQ(row.rows_per_stage != 0, row.kernel == ATTNRES_KERNEL_RING);
      EXPECT_EQ(row.ctas_per_sm != 0, row.kernel == ATTNRES_KERNEL_RING);
      EXPECT_EQ(row.cluster_size != 0, row.kernel == ATTNRES_KERNEL_CLUSTER);
      // A plan never asks for fewer slots than its blocks hold at once.
      EXPECT(row.rows_in_flight == 0 ||
             row.rows_in_flight >= std::max(2, row.rows_per_stage) * row.ctas_per_sm);
    }
  }
}

TEST_CASE(merge_plan_goes_from_clusters_to_the_ring_by_tokens_alone) {
  const std::span<const PlanRow> table = builtin_merge_plan();
  double entries_per_sm = 0.0;
  bool ring = false;
  for (const PlanRow& row : table) {
    EXPECT(row.reads == Reads::kAny);
    EXPECT_EQ(row.max_sources, kMaxSources);
    EXPECT(row.max_entries_per_sm > entries_per_sm);
    entries_per_sm = row.max_entries_per_sm;
    EXPECT(!ring || row.kernel == ATTNRES_KERNEL_RING);
    ring = row.kernel == ATTNRES_KERNEL_RING;
    if (ring) EXPECT_EQ(row.rows_per_stage, 1);  // there is one bank row
  }
  for (const int pdl : {ATTNRES_PDL_OFF, ATTNRES_PDL_WAIT, ATTNRES_PDL_EARLY}) {
    EXPECT(choose_row(call(1, 1, pdl), table, 132) == table.front());
    EXPECT(choose_row(call(8192, 1, pdl), table, 132) == table.back());
  }
}
