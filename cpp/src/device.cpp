// SPDX-License-Identifier: Apache-2.0
#include "device.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "device_forward.hpp"
#include "error.hpp"
#include "plan.hpp"

namespace attnres {
namespace {

constexpr int kMaxDevices = 256;
constexpr int kMaxBlockSharedMemory = 232448;  // of 9.0, 10.0 and 10.3

// Kernels, numbered: those of the operator, of merges, and of the bank pass.
size_t num_kernels() { return instances().size() + merge_kernels().size() + bank_kernels().size(); }

struct DeviceState {
  std::mutex probing;
  std::atomic<bool> probed = false;
  attnres_probe_info info{};  // once `probed`
  std::mutex preparing;
  std::unique_ptr<std::atomic<bool>[]> ready = std::make_unique<std::atomic<bool>[]>(num_kernels());
  // Of the bank kernel, as many are resident at a time; all its instances are alike in that. 0: not asked yet.
  std::atomic<int> bank_clusters = 0;
};

// One state per ordinal, made when it is first asked for and kept until the process ends: a kernel may be
// launched from another static object's destructor.
DeviceState& state_of(int device) {
  static std::array<std::atomic<DeviceState*>, kMaxDevices> states{};
  if (device < 0 || device >= kMaxDevices) {
    fail(ATTNRES_INVALID_ARGUMENT, "device: expected 0 <= device < " + std::to_string(kMaxDevices) +
                                       ", got " + std::to_string(device));
  }
  DeviceState* state = states[device].load(std::memory_order_acquire);
  if (state == nullptr) {
    auto fresh = std::make_unique<DeviceState>();
    if (states[device].compare_exchange_strong(state, fresh.get(), std::memory_order_acq_rel)) {
      state = fresh.release();
    }
  }
  return *state;
}

std::string describe(cudaError_t code) {
  return std::string(cudaGetErrorName(code)) + " (" + cudaGetErrorString(code) + ")";
}

// Errors that a failed kernel leaves in the context for every later call.
bool is_left_behind(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

template <size_t SIZE>
void set_text(char (&destination)[SIZE], const std::string& text) {
  std::snprintf(destination, SIZE, "%s", text.c_str());
}

int attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  require_success(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Relaxes stream capture for a scope: loading a kernel is not part of what is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Whether the machine may do later what it refuses now.
bool may_pass(cudaError_t code) {
  return code == cudaErrorMemoryAllocation || code == cudaErrorDevicesUnavailable;
}

// Loads a kernel on `device`. Not by CurrentDevice, which asks the probe what a failure means.
cudaError_t find_kernel(int device) {
  const RelaxedCapture relaxed;
  int current = 0;
  cudaError_t code = cudaGetDevice(&current);
  if (code != cudaSuccess) return code;
  if (device != current) code = cudaSetDevice(device);
  cudaFuncAttributes attributes;
  if (code == cudaSuccess) {
    code = cudaFuncGetAttributes(&attributes, instances().front().function());
  }
  if (device != current) cudaSetDevice(current);
  return code;
}

// Fills `info` or says in `info.reason` why the native kernels cannot run.
void fill_probe(attnres_probe_info& info) {
  info.struct_size = sizeof(info);
  set_text(info.built_targets, built_targets());
  require_success(cudaRuntimeGetVersion(&info.runtime_version), "cudaRuntimeGetVersion");
  cudaDriverGetVersion(&info.driver_version);
  cudaGetLastError();
  if (info.driver_version == 0) {
    set_text(info.reason, "no CUDA driver is installed");
    return;
  }
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess) {
    cudaGetLastError();
    if (counted == cudaErrorInsufficientDriver) {
      set_text(info.reason, "the CUDA driver is too old: expected at least " +
                                std::to_string(info.runtime_version) + ", got " +
                                std::to_string(info.driver_version));
    } else {
      set_text(info.reason, "no CUDA device: " + describe(counted));
    }
    return;
  }
  if (info.device >= count) {
    set_text(info.reason, "no CUDA device " + std::to_string(info.device) + ": " +
                              std::to_string(count) + " visible");
    return;
  }
  info.compute_major = attribute_of(cudaDevAttrComputeCapabilityMajor, info.device);
  info.compute_minor = attribute_of(cudaDevAttrComputeCapabilityMinor, info.device);
  info.num_sms = attribute_of(cudaDevAttrMultiProcessorCount, info.device);
  cudaDeviceProp properties;
  require_success(cudaGetDeviceProperties(&properties, info.device), "cudaGetDeviceProperties");
  set_text(info.device_name, properties.name);
  const char* target = target_for(info.compute_major, info.compute_minor);
  if (target == nullptr) {
    set_text(info.reason, "no kernel for compute capability " + std::to_string(info.compute_major) +
                              "." + std::to_string(info.compute_minor) +
                              ": this library was built for " + built_targets());
    return;
  }
  // The runtime has the last word on whether a kernel exists for this device.
  const cudaError_t found = find_kernel(info.device);
  if (found != cudaSuccess) {
    cudaGetLastError();
    set_text(info.reason, "the CUDA runtime finds no kernel for this device: " + describe(found));
    if (may_pass(found)) set_text(info.target, target);
    return;
  }
  set_text(info.target, target);
  info.native = 1;
}

attnres_probe_info probe_now(int device) {
  attnres_probe_info info{};
  info.device = device;
  try {
    fill_probe(info);
  } catch (const Error& error) {
    info.native = 0;
    set_text(info.reason, error.message);
  }
  return info;
}

// A device has a compiled target and yet no kernel: what may pass, and is not kept.
bool is_passing(const attnres_probe_info& info) {
  return info.native == 0 && info.target[0] != '\0';
}

attnres_probe_info ask(DeviceState& state, int device) {
  const std::lock_guard lock(state.probing);
  if (!state.probed.load(std::memory_order_relaxed)) {
    const attnres_probe_info info = probe_now(device);
    if (is_passing(info)) return info;
    state.info = info;
    state.probed.store(true, std::memory_order_release);
  }
  return state.info;
}

// Loads a kernel on the current device and raises its shared-memory limit, once.
void prepare_kernel(size_t number, const void* function, bool has_dynamic_shared_memory,
                    int device) {
  DeviceState& state = state_of(device);
  std::atomic<bool>& ready = state.ready[number];
  if (ready.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(state.preparing);
  if (ready.load(std::memory_order_relaxed)) return;
  const RelaxedCapture relaxed;
  cudaFuncAttributes attributes;
  require_success(cudaFuncGetAttributes(&attributes, function), "cudaFuncGetAttributes");
  if (has_dynamic_shared_memory) {
    require_success(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kMaxBlockSharedMemory - static_cast<int>(attributes.sharedSizeBytes)),
        "cudaFuncSetAttribute");
  }
  ready.store(true, std::memory_order_release);
}

// The probe says better than an error code what a machine lacks: a driver, a newer one, such a device.
void require_device(cudaError_t code, const char* what, int device) {
  if (code == cudaSuccess) return;
  cudaGetLastError();
  const attnres_probe_info& info = probe_cached(std::max(device, 0));
  if (info.native == 0) fail(ATTNRES_UNSUPPORTED, info.reason);
  require_success(code, what);
}

}  // namespace

void require_success(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();
  const std::string origin = is_left_behind(code) ? " (left by earlier work on this device)" : "";
  fail(ATTNRES_CUDA_ERROR, std::string(what) + ": " + describe(code) + origin);
}

CurrentDevice::CurrentDevice(int device) : ordinal_(device) {
  int current = 0;
  require_device(cudaGetDevice(&current), "cudaGetDevice", device);
  if (device < 0) {
    ordinal_ = current;
  } else if (device != current) {
    require_device(cudaSetDevice(device), "cudaSetDevice", device);
    restore_ = current;
  }
}

CurrentDevice::~CurrentDevice() {
  if (restore_ >= 0) cudaSetDevice(restore_);
}

const attnres_probe_info& probe_cached(int device) {
  DeviceState& state = state_of(device);
  if (!state.probed.load(std::memory_order_acquire)) {
    const attnres_probe_info info = ask(state, device);
    if (is_passing(info)) fail(ATTNRES_CUDA_ERROR, info.reason);
  }
  return state.info;
}

const attnres_probe_info& require_native(int device) {
  const attnres_probe_info& info = probe_cached(device);
  if (info.native == 0) fail(ATTNRES_UNSUPPORTED, info.reason);
  return info;
}

void prepare(const Instance& instance, int device) {
  prepare_kernel(&instance - instances().data(), instance.function(),
                 instance.permutation.kernel == ATTNRES_KERNEL_RING, device);
}

void prepare(const MergeEntry& entry, int device) {
  prepare_kernel(instances().size() + (&entry - merge_kernels().data()),
                 reinterpret_cast<const void*>(entry.get().function),
                 entry.kernel == ATTNRES_KERNEL_RING, device);
}

int prepare_bank(const BankEntry& entry, int device) {
  const BankKernel kernel = entry.get();
  const void* function = reinterpret_cast<const void*>(kernel.function);
  prepare_kernel(instances().size() + merge_kernels().size() + (&entry - bank_kernels().data()),
                 function, true, device);
  std::atomic<int>& resident = state_of(device).bank_clusters;
  int clusters = resident.load(std::memory_order_acquire);
  if (clusters > 0) return clusters;
  const RelaxedCapture relaxed;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBankClusterSize);
  config.blockDim = dim3(kernel.block_size);
  config.dynamicSmemBytes = kernel.shared_memory;
  require_success(cudaOccupancyMaxActiveClusters(&clusters, function, &config),
                  "cudaOccupancyMaxActiveClusters");
  clusters = std::max(clusters, 1);
  resident.store(clusters, std::memory_order_release);
  return clusters;
}

attnres_probe_info probe(int device) {
  if (device < 0) {
    int current = 0;
    device = cudaGetDevice(&current) == cudaSuccess ? current : 0;
    cudaGetLastError();
  }
  // No device has such an ordinal, so nothing is kept for it.
  attnres_probe_info info =
      device < kMaxDevices ? ask(state_of(device), device) : probe_now(device);
  if (info.native != 0) {
    set_text(info.plan,
             plan_source({info.compute_major, info.compute_minor, info.num_sms, info.device_name}));
  }
  set_text(info.plan_error, plan_error());
  return info;
}

void warmup(int device) {
  const CurrentDevice current(device);
  require_native(current.ordinal());
  for (const Instance& instance : instances()) prepare(instance, current.ordinal());
  for (const MergeEntry& entry : merge_kernels()) prepare(entry, current.ordinal());
  for (const BankEntry& entry : bank_kernels()) prepare_bank(entry, current.ordinal());
}

int num_permutations() { return static_cast<int>(instances().size()); }

attnres_permutation get_permutation(int index) {
  if (index < 0 || index >= num_permutations()) {
    fail(ATTNRES_INVALID_ARGUMENT, "index: expected 0 <= index < " +
                                       std::to_string(num_permutations()) + ", got " +
                                       std::to_string(index));
  }
  return instances()[index].permutation;
}

}  // namespace attnres
