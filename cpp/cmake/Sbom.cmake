# SPDX-License-Identifier: Apache-2.0
# A software bill of materials in the wheel's .dist-info/sboms (PEP 770): what of others is inside the
# binaries, and what made them. Only the build knows the versions, hence here. It names no time and no
# serial number, so that the same inputs give the same bytes.

include_guard(GLOBAL)

# Append one component to the lists that sbom.cdx.json.in takes. Its licence is an SPDX expression, or the
# name of a licence that has none.
function(
  _attnres_sbom_component
  name
  version
  purl
  supplier
  license
)
  if(license MATCHES "^[A-Za-z0-9.+-]+( (WITH|OR|AND) [A-Za-z0-9.+-]+)*$")
    set(license "{ \"expression\": \"${license}\" }")
  else()
    set(license "{ \"license\": { \"name\": \"${license}\" } }")
  endif()
  set(component "\n    {\n      \"type\": \"library\",\n      \"bom-ref\": \"${purl}\",")
  string(APPEND component "\n      \"supplier\": { \"name\": \"${supplier}\" },")
  string(APPEND component "\n      \"name\": \"${name}\",\n      \"version\": \"${version}\",")
  string(APPEND component "\n      \"scope\": \"required\",\n      \"licenses\": [${license}],")
  string(APPEND component "\n      \"purl\": \"${purl}\"\n    }")
  list(APPEND SBOM_COMPONENTS "${component}")
  list(APPEND SBOM_DEPENDS "\"${purl}\"")
  set(SBOM_COMPONENTS "${SBOM_COMPONENTS}" PARENT_SCOPE)
  set(SBOM_DEPENDS "${SBOM_DEPENDS}" PARENT_SCOPE)
endfunction()

function(attnres_install_sbom template destination)
  set(SBOM_COMPONENTS)
  set(SBOM_DEPENDS)
  set(SBOM_CUDA_COMPILER "none")
  set(SBOM_CUDA_TARGETS "none")
  set(SBOM_CXX_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
  _attnres_sbom_component(
    pybind11
    "${pybind11_VERSION}"
    "pkg:pypi/pybind11@${pybind11_VERSION}"
    pybind
    BSD-3-Clause
  )
  if(ATTNRES_CUDA)
    set(SBOM_CUDA_COMPILER "${CMAKE_CUDA_COMPILER_ID} ${CMAKE_CUDA_COMPILER_VERSION}")
    set(SBOM_CUDA_TARGETS "${ATTNRES_CUDA_TARGETS}")
    _attnres_sbom_component(
      cudart_static
      "${CUDAToolkit_VERSION}"
      "pkg:generic/nvidia/cudart_static@${CUDAToolkit_VERSION}"
      "NVIDIA Corporation"
      "NVIDIA CUDA Toolkit End User License Agreement"
    )
  endif()
  list(JOIN SBOM_COMPONENTS "," SBOM_COMPONENTS)
  list(JOIN SBOM_DEPENDS ", " SBOM_DEPENDS)
  set(output "${CMAKE_CURRENT_BINARY_DIR}/libattnres.cdx.json")
  configure_file("${template}" "${output}" @ONLY)
  install(FILES "${output}" DESTINATION "${destination}" COMPONENT python)
endfunction()
