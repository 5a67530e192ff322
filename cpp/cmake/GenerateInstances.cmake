# SPDX-License-Identifier: Apache-2.0
# From the table cuda/instances.cmake to explicit instantiations, in the build tree:
#
#   forward_ring_h7168_n9_nc3.cu ...  template struct attnres::RingInstance<...>;
#   forward_cluster_h7168_n9.cu ...   template struct attnres::ClusterInstance<...>;
#   forward_floor_h7168.cu ...        template struct attnres::FloorInstance<...>; for benchmarks
#   registry.inc                      ATTNRES_RING(...), ATTNRES_CLUSTER(...), ATTNRES_FLOOR(...)
#   built_targets.inc                 "90a;100a;103a"
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
      foreach(NC IN LISTS ATTNRES_TABLE_RING_ROWS_PER_STAGE)
        set(instances "")
        foreach(B IN LISTS ATTNRES_TABLE_RING_PREFIXES_PER_ROW)
          foreach(flags IN LISTS ATTNRES_TABLE_NORM_AND_STATIC)
            list(APPEND instances "${H}, ${N}, ${NC}, ${B}, ${flags}")
          endforeach()
        endforeach()
        _attnres_write_instances(ring Ring "h${H}_n${N}_nc${NC}" "${instances}")
      endforeach()
      set(instances "")
      foreach(CLUSTER IN LISTS ATTNRES_TABLE_CLUSTER_SIZES)
        foreach(flags IN LISTS ATTNRES_TABLE_NORM_AND_STATIC)
          list(APPEND instances "${H}, ${N}, ${CLUSTER}, ${flags}")
        endforeach()
      endforeach()
      _attnres_write_instances(cluster Cluster "h${H}_n${N}" "${instances}")
    endforeach()
    set(instances "")
    foreach(N IN LISTS ATTNRES_TABLE_SOURCES)
      list(APPEND instances "${H}, ${N}")
    endforeach()
    _attnres_write_instances(floor Floor "h${H}" "${instances}")
  endforeach()

  file(CONFIGURE OUTPUT "${output_dir}/registry.inc" CONTENT "${registry}" @ONLY)
  file(
    CONFIGURE
    OUTPUT "${output_dir}/built_targets.inc"
    CONTENT "\"${ATTNRES_CUDA_TARGETS}\"\n"
    @ONLY
  )
  # More sources take longer to compile; the longest first keeps all cores busy to the end.
  list(REVERSE sources)
  set(${out_sources} "${sources}" PARENT_SCOPE)
endfunction()

# One file of instantiations; appends to `sources` and `registry` of the caller.
macro(_attnres_write_instances kernel class suffix instances)
  set(content "// Generated from cuda/instances.cmake.\n#include \"forward_${kernel}.cuh\"\n\n")
  string(TOUPPER "${kernel}" upper)
  foreach(instance IN ITEMS ${instances})
    string(REGEX REPLACE ", *" ", " instance "${instance}")
    string(APPEND content "template struct attnres::${class}Instance<${instance}>;\n")
    string(APPEND registry "ATTNRES_${upper}(${instance})\n")
  endforeach()
  set(file "${output_dir}/forward_${kernel}_${suffix}.cu")
  file(CONFIGURE OUTPUT "${file}" CONTENT "${content}" @ONLY)
  list(APPEND sources "${file}")
endmacro()
