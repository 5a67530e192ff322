// SPDX-License-Identifier: Apache-2.0
// Every compiled permutation, as CMake made it from cuda/instances.cmake.
#pragma once

#include <cstdint>
#include <span>

#include "attnres/attnres.h"
#include "instances.hpp"

namespace attnres {

struct Instance {
  attnres_permutation permutation;
  const void* (*function)();
  cudaError_t (*launch)(const ForwardParams&, const LaunchShape&, cudaStream_t);
  const uint32_t* block_size;
  const uint32_t* max_ctas_per_sm;      // ring kernel only
  const uint32_t* max_ring_rows;        // ring kernel only
  const uint32_t* fixed_shared_memory;  // ring kernel only
};

std::span<const Instance> instances();

// The instance of exactly these parameters, or null.
const Instance* find_instance(const attnres_permutation& permutation);

struct FloorEntry {
  int32_t hidden_size;
  int32_t num_sources;
  cudaError_t (*launch)(const ForwardParams&, int, bool, cudaStream_t);
};

// The floor kernel of these parameters, or null.
const FloorEntry* find_floor(int64_t hidden_size, int num_sources);

// The compiled targets as CMake was given them, e.g. "90a;100a;103a".
const char* built_targets();

// The compiled target that runs on a GPU of this compute capability, or null. Each target's machine code
// runs on its own capability alone.
const char* target_for(int compute_major, int compute_minor);

}  // namespace attnres
