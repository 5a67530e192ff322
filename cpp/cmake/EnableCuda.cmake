# SPDX-License-Identifier: Apache-2.0
# Enable the CUDA language with, in this order: the compiler the user named (CMAKE_CUDA_COMPILER), a system
# nvcc >= 13, NVIDIA's compiler from PyPI. find_nvcc.py holds the search.

include_guard(GLOBAL)

if(NOT CMAKE_CUDA_COMPILER)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/find_nvcc.py"
      OUTPUT_VARIABLE CMAKE_CUDA_COMPILER
      OUTPUT_STRIP_TRAILING_WHITESPACE
    )
  else()
    find_program(CMAKE_CUDA_COMPILER nvcc HINTS ENV CUDACXX ENV CUDA_PATH /usr/local/cuda/bin)
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    message(
      FATAL_ERROR
      "No CUDA compiler: expected nvcc >= 13.0 on PATH or in CUDACXX, or the PyPI package "
      "\"cuda-toolkit[nvcc,cccl]==13.0.*\" in the environment of Python. "
      "-DATTNRES_CUDA=OFF builds the library without kernels."
    )
  endif()
endif()

# The PyPI package lays the toolkit out as <root>/{bin,include,lib}, without the development symbolic links
# and the lib64 folder that nvcc and FindCUDAToolkit look for.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH _attnres_cuda_root)
cmake_path(GET _attnres_cuda_root PARENT_PATH _attnres_cuda_root)
if(_attnres_cuda_root MATCHES "/nvidia/cu13$")
  set(CUDAToolkit_ROOT "${_attnres_cuda_root}")
  set(CUDA_CUDART "${_attnres_cuda_root}/lib/libcudart.so.13" CACHE FILEPATH "CUDA runtime")
  if(NOT CMAKE_CUDA_FLAGS MATCHES "-L${_attnres_cuda_root}/lib")
    string(APPEND CMAKE_CUDA_FLAGS " -L${_attnres_cuda_root}/lib")
  endif()
endif()

# Targets name their own architectures.
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(
    FATAL_ERROR
    "CMAKE_CUDA_COMPILER: expected nvcc >= 13.0, got ${CMAKE_CUDA_COMPILER_VERSION} "
    "(${CMAKE_CUDA_COMPILER})"
  )
endif()
find_package(CUDAToolkit 13.0 REQUIRED)
