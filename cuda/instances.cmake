# SPDX-License-Identifier: Apache-2.0
# THE table of template permutations: the only place where one is added. Each axis is a list; CMake writes
# one explicit instantiation per combination into the build tree, and the same list into the registry.
#
# HAS_OUTPUT_NORM and STATIC_COMMON_PATH come as legal pairs: the static common path (delta, output norm,
# no write) has the output norm by definition.

set(ATTNRES_TABLE_HIDDEN_SIZES 7168)
set(ATTNRES_TABLE_SOURCES 1 2 3 4 5 6 7 8 9)                # N = num_blocks + 1
set(ATTNRES_TABLE_NORM_AND_STATIC "false,false" "true,false" "true,true")

# Ring kernel: rows per stage (NC) and prefixes per bank row (B).
set(ATTNRES_TABLE_RING_ROWS_PER_STAGE 1 2 3)
set(ATTNRES_TABLE_RING_PREFIXES_PER_ROW 1 2)

# Cluster kernel: thread blocks per token. H must divide into CLUSTER * 256 elements, full warps of 8 each.
set(ATTNRES_TABLE_CLUSTER_SIZES 2 4 7)

# Kernels of the two phases: whether the bank of weighted means is float32. Their other axes are those above.
set(ATTNRES_TABLE_FLOAT_BANKS false true)
