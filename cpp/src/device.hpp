// SPDX-License-Identifier: Apache-2.0
// State of one CUDA device: what the probe found, and which kernels are ready.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "attnres/attnres.h"
#include "registry.hpp"
#include "two_phase_registry.hpp"

namespace attnres {

// Makes `device` (-1: leaves it) the calling thread's current device for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  int ordinal() const { return ordinal_; }

 private:
  int ordinal_;
  int restore_ = -1;
};

// What was found out about a device, once per process. Never throws for want of a GPU.
const attnres_probe_info& probe_cached(int device);

// The same, or Error(ATTNRES_UNSUPPORTED) where the native kernels cannot run.
const attnres_probe_info& require_native(int device);

// Loads a kernel on the current device `device` and raises its shared-memory limit, once.
void prepare(const Instance& instance, int device);
void prepare(const MergeEntry& entry, int device);

// The same; returns how many clusters of the kernel the device holds at a time.
int prepare_bank(const BankEntry& entry, int device);

// Throws Error(ATTNRES_CUDA_ERROR) unless `code` is cudaSuccess, and takes the error off the thread.
void require_success(cudaError_t code, const char* what);

}  // namespace attnres
