# SPDX-License-Identifier: Apache-2.0
# From the table cuda/instances.cmake to explicit instantiations, in the build tree:
#
#   forward_ring_h7168_n9.cu ...     template struct attnres::RingInstance<...>; one file for each H and N
#   forward_cluster_h7168_n9.cu ...  template struct attnres::ClusterInstance<...>;
#   registry.inc                     ATTNRES_RING(...) and ATTNRES_CLUSTER(...), in the table's order
#   built_targets.inc                "90a;100a;103a"
#
# Files are rewritten only when they change, so a new configure step recompiles nothing.

set(_attnres_targets_known 90a 100a 103a)

function(attnres_generate_instances output_dir out_sources)
  foreach(target IN LISTS ATTNRES_CUDA_TARGETS)
    if(NOT target IN_LIST _attnres_targets_known)
      message(
        FATAL_ERROR
        "ATTNRES_CUDA_TARGETS: expected a list of ${_attnres_targets_known}, got \"${target}\""
      )
    endif()
  endforeach()
  foreach(H IN LISTS ATTNRES_HIDDEN_SIZES)
    if(NOT H IN_LIST ATTNRES_TABLE_HIDDEN_SIZES)
      message(
        FATAL_ERROR
        "ATTNRES_HIDDEN_SIZES: expected a list of ${ATTNRES_TABLE_HIDDEN_SIZES}, got \"${H}\""
      )
    endif()
  endforeach()

  set(sources "")
  set(registry "")
  foreach(H IN LISTS ATTNRES_HIDDEN_SIZES)
    foreach(N IN LISTS ATTNRES_TABLE_SOURCES)
      set(ring "")
      set(cluster "")
      foreach(norm_and_static IN LISTS ATTNRES_TABLE_NORM_AND_STATIC)
        string(REPLACE "," ", " flags "${norm_and_static}")
        foreach(NC IN LISTS ATTNRES_TABLE_RING_ROWS_PER_STAGE)
          foreach(B IN LISTS ATTNRES_TABLE_RING_PREFIXES_PER_ROW)
            list(APPEND ring "${H}, ${N}, ${NC}, ${B}, ${flags}")
          endforeach()
        endforeach()
        foreach(CLUSTER IN LISTS ATTNRES_TABLE_CLUSTER_SIZES)
          list(APPEND cluster "${H}, ${N}, ${CLUSTER}, ${flags}")
        endforeach()
      endforeach()
      _attnres_write_instances(ring Ring "${ring}")
      _attnres_write_instances(cluster Cluster "${cluster}")
    endforeach()
  endforeach()

  file(CONFIGURE OUTPUT "${output_dir}/registry.inc" CONTENT "${registry}" @ONLY)
  file(
    CONFIGURE
    OUTPUT "${output_dir}/built_targets.inc"
    CONTENT "\"${ATTNRES_CUDA_TARGETS}\"\n"
    @ONLY
  )
  set(${out_sources} "${sources}" PARENT_SCOPE)
endfunction()

# One file of instantiations; appends to `sources` and `registry` of the caller.
macro(_attnres_write_instances kernel class arguments)
  set(content "// Generated from cuda/instances.cmake.\n#include \"forward_${kernel}.cuh\"\n\n")
  string(TOUPPER "${kernel}" upper)
  foreach(instance IN ITEMS ${arguments})
    string(APPEND content "template struct attnres::${class}Instance<${instance}>;\n")
    string(APPEND registry "ATTNRES_${upper}(${instance})\n")
  endforeach()
  set(file "${output_dir}/forward_${kernel}_h${H}_n${N}.cu")
  file(CONFIGURE OUTPUT "${file}" CONTENT "${content}" @ONLY)
  list(APPEND sources "${file}")
endmacro()
