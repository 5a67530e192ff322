# SPDX-License-Identifier: Apache-2.0
# From the table cuda/instances.cmake to explicit instantiations, in the build tree:
#
#   forward_ring_h7168_n9_nc3.cu ...  template struct attnres::RingInstance<...>;
#   forward_cluster_h7168_n9.cu ...   template struct attnres::ClusterInstance<...>;
#   forward_floor_h7168.cu ...        template struct attnres::FloorInstance<...>; for benchmarks
#   merge_ring_h7168_bfloat16.cu ...  of the kernels of the two phases, likewise
#   registry.inc                      ATTNRES_RING(...), ATTNRES_CLUSTER(...), ATTNRES_FLOOR(...)
#   two_phase.inc                     ATTNRES_MERGE_RING(...), ATTNRES_MERGE_CLUSTER(...),
#                                     ATTNRES_BANK(...), ATTNRES_BANK_FLOOR(...)
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
  set(two_phase "")
  foreach(H IN LISTS ATTNRES_HIDDEN_SIZES)
    foreach(N IN LISTS ATTNRES_TABLE_SOURCES)
      foreach(NC IN LISTS ATTNRES_TABLE_RING_ROWS_PER_STAGE)
        set(instances "")
        foreach(B IN LISTS ATTNRES_TABLE_RING_PREFIXES_PER_ROW)
          foreach(flags IN LISTS ATTNRES_TABLE_NORM_AND_STATIC)
            list(APPEND instances "${H}, ${N}, ${NC}, ${B}, ${flags}")
          endforeach()
        endforeach()
        _attnres_write_instances(registry RING forward_ring "h${H}_n${N}_nc${NC}" "${instances}")
      endforeach()
      set(instances "")
      foreach(CLUSTER IN LISTS ATTNRES_TABLE_CLUSTER_SIZES)
        foreach(flags IN LISTS ATTNRES_TABLE_NORM_AND_STATIC)
          list(APPEND instances "${H}, ${N}, ${CLUSTER}, ${flags}")
        endforeach()
      endforeach()
      _attnres_write_instances(registry CLUSTER forward_cluster "h${H}_n${N}" "${instances}")
    endforeach()
    set(instances "")
    foreach(N IN LISTS ATTNRES_TABLE_SOURCES)
      list(APPEND instances "${H}, ${N}")
    endforeach()
    _attnres_write_instances(registry FLOOR forward_floor "h${H}" "${instances}")
    foreach(FLOAT_BANK IN LISTS ATTNRES_TABLE_FLOAT_BANKS)
      set(suffix "h${H}_float_${FLOAT_BANK}")
      set(instances "")
      foreach(B IN LISTS ATTNRES_TABLE_RING_PREFIXES_PER_ROW)
        foreach(flags IN LISTS ATTNRES_TABLE_NORM_AND_STATIC)
          list(APPEND instances "${H}, ${B}, ${FLOAT_BANK}, ${flags}")
        endforeach()
      endforeach()
      _attnres_write_instances(two_phase MERGE_RING merge_ring "${suffix}" "${instances}")
      set(instances "")
      foreach(CLUSTER IN LISTS ATTNRES_TABLE_CLUSTER_SIZES)
        foreach(flags IN LISTS ATTNRES_TABLE_NORM_AND_STATIC)
          list(APPEND instances "${H}, ${CLUSTER}, ${FLOAT_BANK}, ${flags}")
        endforeach()
      endforeach()
      _attnres_write_instances(two_phase MERGE_CLUSTER merge_cluster "${suffix}" "${instances}")
      _attnres_write_instances(two_phase BANK bank_pass "${suffix}" "${H}, ${FLOAT_BANK}")
      _attnres_write_instances(two_phase BANK_FLOOR bank_floor "${suffix}" "${H}, ${FLOAT_BANK}")
    endforeach()
  endforeach()

  file(CONFIGURE OUTPUT "${output_dir}/registry.inc" CONTENT "${registry}" @ONLY)
  file(CONFIGURE OUTPUT "${output_dir}/two_phase.inc" CONTENT "${two_phase}" @ONLY)
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

# One file of instantiations of the class that `kernel` names (MERGE_RING: MergeRingInstance), which `header`
# defines; appends to `sources` and to the variable `registry_name` of the caller.
macro(
  _attnres_write_instances
  registry_name
  kernel
  header
  suffix
  instances
)
  set(content "// Generated from cuda/instances.cmake.\n#include \"${header}.cuh\"\n\n")
  string(REPLACE "_" ";" words "${kernel}")
  set(class "")
  foreach(word IN LISTS words)
    string(SUBSTRING "${word}" 0 1 initial)
    string(SUBSTRING "${word}" 1 -1 rest)
    string(TOLOWER "${rest}" rest)
    string(APPEND class "${initial}${rest}")
  endforeach()
  foreach(instance IN ITEMS ${instances})
    string(REGEX REPLACE ", *" ", " instance "${instance}")
    string(APPEND content "template struct attnres::${class}Instance<${instance}>;\n")
    string(APPEND ${registry_name} "ATTNRES_${kernel}(${instance})\n")
  endforeach()
  set(file "${output_dir}/${header}_${suffix}.cu")
  file(CONFIGURE OUTPUT "${file}" CONTENT "${content}" @ONLY)
  list(APPEND sources "${file}")
endmacro()
