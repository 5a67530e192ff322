// SPDX-License-Identifier: Apache-2.0
// What the host side does for each of several GPUs, without one: the CUDA runtime and the kernels of the
// registry are replaced by the ones below, which keep a record. Internal functions, so compiled in.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "bank_share.hpp"
#include "device.hpp"
#include "device_forward.hpp"
#include "error.hpp"
#include "fake_two_phase.hpp"
#include "plan_choice.hpp"
#include "registry.hpp"
#include "test_runner.hpp"
#include "two_phase_registry.hpp"

namespace {

struct FakeDevice {
  int major, minor, num_sms;
  const char* name;
};

// The registry's targets leave out the third; the last two are for what fails while a device is probed.
constexpr std::array<FakeDevice, 6> kDevices = {{{9, 0, 132, "Hopper"},
                                                 {10, 0, 148, "Blackwell"},
                                                 {8, 9, 142, "Ada"},
                                                 {9, 0, 16, "Slice"},
                                                 {9, 0, 132, "Full"},
                                                 {9, 0, 132, "Broken"}}};
constexpr int kHopper = 0, kBlackwell = 1, kAda = 2, kSlice = 3, kFull = 4, kBroken = 5;

struct Launch {
  const void* function;
  int device;
  cudaStream_t stream;
  uint32_t grid_size;
  // Of the kernels of the two phases.
  uint32_t block_size, shared_memory, cluster_size;
  bool programmatic;
  attnres::BankParams bank;
  attnres::MergeParams merge;
};

// What the fake runtime has seen. Failures happen once each.
struct Record {
  std::mutex mutex;
  std::map<std::pair<const void*, int>, int> loads, limits;  // by function and device
  std::vector<Launch> launches;
  std::map<int, int> property_queries, cluster_queries;  // by device
  cudaError_t next_device = cudaSuccess, next_load = cudaSuccess, next_limit = cudaSuccess,
              next_clusters = cudaSuccess, next_launch = cudaSuccess;
};
Record record;
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

cudaError_t take(cudaError_t& failure) {
  const cudaError_t code = failure;
  failure = cudaSuccess;
  return result(code);
}

cudaError_t record_launch(Launch launch) {
  const std::lock_guard lock(record.mutex);
  const cudaError_t code = take(record.next_launch);
  launch.device = current_device;
  if (code == cudaSuccess) record.launches.push_back(launch);
  return code;
}

cudaError_t record_launch(const void* function, uint32_t grid_size, cudaStream_t stream) {
  Launch launch{};
  launch.function = function;
  launch.stream = stream;
  launch.grid_size = grid_size;
  return record_launch(launch);
}

bool is_bank_kernel(const void* function) {
  for (const attnres::BankEntry& entry : attnres::bank_kernels()) {
    if (reinterpret_cast<const void*>(entry.get().function) == function) return true;
  }
  return false;
}

// As on a GPU, where some SMs are left over. The slice has room for none.
int resident_clusters(int device) { return (kDevices[device].num_sms - 12) / 8; }

void forget_launches() {
  const std::lock_guard lock(record.mutex);
  record.launches.clear();
}

}  // namespace

// The CUDA runtime, as far as the library uses it.
extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(kDevices.size())) {
    return result(cudaErrorInvalidDevice);
  }
  const std::lock_guard lock(record.mutex);
  if (take(record.next_device) != cudaSuccess) return last_error;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(kDevices.size());
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t code = last_error;
  last_error = cudaSuccess;
  return code;
}
const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "cudaErrorOfTheTest";
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the test"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const FakeDevice& fake = kDevices[device];
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? fake.major
           : attribute == cudaDevAttrComputeCapabilityMinor ? fake.minor
                                                            : fake.num_sms;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const std::lock_guard lock(record.mutex);
  ++record.property_queries[device];
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "%s", kDevices[device].name);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  const std::lock_guard lock(record.mutex);
  if (take(record.next_load) != cudaSuccess) return last_error;
  ++record.loads[{function, current_device}];
  *attributes = {};
  attributes->sharedSizeBytes = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const std::lock_guard lock(record.mutex);
  if (take(record.next_limit) != cudaSuccess) return last_error;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value != 232448 - 1024) {
    return result(cudaErrorInvalidValue);
  }
  ++record.limits[{function, current_device}];
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                           const cudaLaunchConfig_t* config) {
  const std::lock_guard lock(record.mutex);
  if (take(record.next_clusters) != cudaSuccess) return last_error;
  // The kernel's limit must have been raised before.
  if (!is_bank_kernel(function) || record.limits[{function, current_device}] == 0 ||
      config->blockDim.x != 640 || config->dynamicSmemBytes != 230000) {
    return result(cudaErrorInvalidValue);
  }
  ++record.cluster_queries[current_device];
  *clusters = resident_clusters(current_device);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  Launch launch{};
  launch.function = function;
  launch.stream = config->stream;
  launch.grid_size = config->gridDim.x;
  launch.block_size = config->blockDim.x;
  launch.shared_memory = static_cast<uint32_t>(config->dynamicSmemBytes);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      launch.cluster_size = attribute.val.clusterDim.x;
    } else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      launch.programmatic = attribute.val.programmaticStreamSerializationAllowed != 0;
    } else {
      return result(cudaErrorInvalidValue);
    }
  }
  if (is_bank_kernel(function)) {
    launch.bank = *static_cast<const attnres::BankParams*>(arguments[0]);
  } else {
    launch.merge = *static_cast<const attnres::MergeParams*>(arguments[0]);
  }
  return record_launch(launch);
}
}

// The kernels of fake_device/registry.inc.
namespace attnres {

template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize = 256;
template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kMaxCtasPerSm = 2;
template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kMaxRingRows = 16;
template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kFixedSharedMemory =
    2048;
template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const void* RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::function() {
  return &kBlockSize;
}
template <int H, int N, int NC, int B, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
cudaError_t RingInstance<H, N, NC, B, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::launch(
    const ForwardParams&, const LaunchShape& shape, cudaStream_t stream) {
  return record_launch(function(), shape.grid_size, stream);
}

template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const uint32_t ClusterInstance<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::kBlockSize =
    224;
template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
const void* ClusterInstance<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::function() {
  return &kBlockSize;
}
template <int H, int N, int CLUSTER, bool HAS_OUTPUT_NORM, bool STATIC_COMMON_PATH>
cudaError_t ClusterInstance<H, N, CLUSTER, HAS_OUTPUT_NORM, STATIC_COMMON_PATH>::launch(
    const ForwardParams&, const LaunchShape& shape, cudaStream_t stream) {
  return record_launch(function(), shape.grid_size, stream);
}

template <int H, int N>
cudaError_t FloorInstance<H, N>::launch(const ForwardParams&, int, bool, cudaStream_t stream) {
  return record_launch(nullptr, 0, stream);
}

#define ATTNRES_RING(H, N, NC, B, NORM, STATIC) \
  template struct RingInstance<H, N, NC, B, NORM, STATIC>;
#define ATTNRES_CLUSTER(H, N, CLUSTER, NORM, STATIC) \
  template struct ClusterInstance<H, N, CLUSTER, NORM, STATIC>;
#define ATTNRES_FLOOR(H, N) template struct FloorInstance<H, N>;
#include "registry.inc"
#undef ATTNRES_RING
#undef ATTNRES_CLUSTER
#undef ATTNRES_FLOOR

}  // namespace attnres

namespace {

using attnres::Error;

cudaStream_t stream_number(uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); }

// Memory is never touched: these launch nothing.
unsigned char memory[16];

attnres_forward_args call_on(int device, int32_t kernel, int64_t num_tokens = 1000) {
  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  args.num_tokens = args.num_bank_tokens = num_tokens;
  args.num_bank_rows = 8;
  args.hidden_size = 7168;
  args.num_blocks = 3;
  args.prefix = args.blocks = args.output = memory;
  args.delta = args.norm_weight = args.qk_weight = args.output_norm_weight = memory;
  args.device = device;
  args.kernel = kernel;
  if (kernel == ATTNRES_KERNEL_RING) args.rows_per_stage = 2;
  if (kernel == ATTNRES_KERNEL_CLUSTER) args.cluster_size = 4;
  return args;
}

attnres_bank_args bank_on(int device, int64_t num_bank_tokens, int32_t num_sites) {
  attnres_bank_args args = ATTNRES_BANK_ARGS_INIT;
  args.num_bank_tokens = num_bank_tokens;
  args.num_bank_rows = 8;
  args.hidden_size = 7168;
  args.num_blocks = 8;
  args.num_sites = num_sites;
  args.blocks = args.norm_weights = args.qk_weights = args.bank = memory;
  args.lse = reinterpret_cast<float*>(memory);
  args.device = device;
  return args;
}

attnres_merge_args merge_on(int device, int64_t num_tokens) {
  attnres_merge_args args = ATTNRES_MERGE_ARGS_INIT;
  args.num_tokens = args.num_bank_tokens = num_tokens;
  args.hidden_size = 7168;
  args.prefix = args.output = memory;
  args.delta = args.bank = args.norm_weight = args.qk_weight = args.output_norm_weight = memory;
  args.lse = reinterpret_cast<const float*>(memory);
  args.device = device;
  return args;
}

// The one launch that a call makes.
Launch launch_of(const attnres_bank_args& args) {
  forget_launches();
  attnres::device_bank(args, stream_number(3));
  EXPECT_EQ(record.launches.size(), size_t{1});
  return record.launches.back();
}
Launch launch_of(const attnres_merge_args& args) {
  forget_launches();
  attnres::device_merge(args, stream_number(3));
  EXPECT_EQ(record.launches.size(), size_t{1});
  return record.launches.back();
}

// The status and message of a call.
template <typename Body>
std::pair<attnres_status, std::string> outcome_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return {error.status, error.message};
  }
  return {ATTNRES_OK, ""};
}

// Why a call is refused; it launches nothing.
template <typename Args, typename Run>
std::string refusal(const Args& args, const Run& run) {
  forget_launches();
  const auto [status, message] = outcome_of([&] { run(args, nullptr); });
  EXPECT_EQ(status, ATTNRES_UNSUPPORTED);
  EXPECT_EQ(record.launches.size(), size_t{0});
  return message;
}

}  // namespace

TEST_CASE(first_calls_of_many_threads_on_several_devices) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(24);
  for (size_t i = 0; i < errors.size(); ++i) {
    threads.emplace_back([i, &error = errors[i]] {
      const std::array devices = {kHopper, kBlackwell, kSlice};
      current_device = devices[i / 8];
      for (int call = 0; call < 50; ++call) {
        const int device = devices[(i + call) % 3];
        const int32_t kernel = call % 2 == 0 ? ATTNRES_KERNEL_RING : ATTNRES_KERNEL_CLUSTER;
        const auto [status, message] =
            outcome_of([&] { attnres::device_forward(call_on(device, kernel), nullptr); });
        if (status != ATTNRES_OK) error = message;
        if (current_device != devices[i / 8]) error = "another device is current";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  std::map<int, int> launches;
  for (const Launch& launch : record.launches) ++launches[launch.device];
  for (const int device : {kHopper, kBlackwell, kSlice}) EXPECT_EQ(launches[device], 400);
}

// Of a kernel that no other test has loaded.
TEST_CASE(what_fails_on_one_device_is_tried_again_and_concerns_no_other) {
  attnres_forward_args args = call_on(kBlackwell, ATTNRES_KERNEL_RING);
  args.output_norm_weight = nullptr;
  for (cudaError_t* failure : {&record.next_load, &record.next_limit, &record.next_launch}) {
    attnres::probe(kBlackwell);  // asks for a kernel itself, the first time
    forget_launches();
    *failure = cudaErrorMemoryAllocation;
    const auto [status, message] = outcome_of([&] { attnres::device_forward(args, nullptr); });
    EXPECT_EQ(status, ATTNRES_CUDA_ERROR);
    EXPECT(message.find("an error of the test") != std::string::npos);
    EXPECT(message.find("left by earlier work") == std::string::npos);
    EXPECT_EQ(record.launches.size(), size_t{0});
    EXPECT_EQ(current_device, 0);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // taken off the thread
    args.device = kSlice;
    EXPECT_EQ(outcome_of([&] { attnres::device_forward(args, nullptr); }).first, ATTNRES_OK);
    args.device = kBlackwell;
  }
  EXPECT_EQ(outcome_of([&] { attnres::device_forward(args, nullptr); }).first, ATTNRES_OK);
  EXPECT_EQ(record.launches.back().device, kBlackwell);
}

TEST_CASE(an_error_of_earlier_work_is_called_that) {
  record.next_launch = cudaErrorIllegalAddress;
  const auto [status, message] =
      outcome_of([] { attnres::device_forward(call_on(kSlice, ATTNRES_KERNEL_RING), nullptr); });
  EXPECT_EQ(status, ATTNRES_CUDA_ERROR);
  EXPECT(message.find("cudaErrorIllegalAddress") != std::string::npos);
  EXPECT(message.find("left by earlier work on this device") != std::string::npos);
  EXPECT_EQ(current_device, 0);
}

TEST_CASE(each_device_is_probed_as_itself_and_once) {
  for (int round = 0; round < 3; ++round) {
    for (const int device : {kHopper, kBlackwell, kAda, kSlice}) {
      const attnres_probe_info info = attnres::probe(device);
      EXPECT_EQ(info.device, device);
      EXPECT_EQ(info.compute_major, kDevices[device].major);
      EXPECT_EQ(info.compute_minor, kDevices[device].minor);
      EXPECT_EQ(info.num_sms, kDevices[device].num_sms);
      EXPECT_EQ(std::string(info.device_name), kDevices[device].name);
      EXPECT_EQ(info.native, device == kAda ? 0 : 1);
      EXPECT_EQ(current_device, 0);
    }
  }
  EXPECT_EQ(std::string(attnres::probe(kHopper).target), "90a");
  EXPECT_EQ(std::string(attnres::probe(kBlackwell).target), "100a");
  EXPECT_EQ(std::string(attnres::probe(kAda).target), "");
  EXPECT(std::string(attnres::probe(kAda).reason).find("8.9") != std::string::npos);
  for (const int device : {kHopper, kBlackwell, kAda, kSlice}) {
    EXPECT_EQ(record.property_queries[device], 1);
  }
}

TEST_CASE(a_device_without_memory_for_a_kernel_is_asked_again) {
  const auto call = [] { attnres::device_forward(call_on(kFull, ATTNRES_KERNEL_RING), nullptr); };
  for (cudaError_t* failure : {&record.next_device, &record.next_load}) {
    for (const cudaError_t code : {cudaErrorMemoryAllocation, cudaErrorDevicesUnavailable}) {
      *failure = code;
      const attnres_probe_info info = attnres::probe(kFull);
      EXPECT_EQ(info.native, 0);
      EXPECT(std::string(info.reason).find("an error of the test") != std::string::npos);
      EXPECT_EQ(current_device, 0);
      EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
  }
  record.next_load = cudaErrorMemoryAllocation;
  EXPECT_EQ(outcome_of(call).first, ATTNRES_CUDA_ERROR);
  EXPECT_EQ(current_device, 0);
  EXPECT_EQ(outcome_of(call).first, ATTNRES_OK);
  EXPECT_EQ(attnres::probe(kFull).native, 1);
}

TEST_CASE(a_device_that_no_kernel_suits_is_not_asked_again) {
  record.next_load = cudaErrorNoKernelImageForDevice;
  for (int round = 0; round < 3; ++round) {
    const attnres_probe_info info = attnres::probe(kBroken);
    EXPECT_EQ(info.native, 0);
    EXPECT_EQ(std::string(info.target), "");
    EXPECT_EQ(outcome_of([] {
                attnres::device_forward(call_on(kBroken, ATTNRES_KERNEL_RING), nullptr);
              }).first,
              ATTNRES_UNSUPPORTED);
  }
  EXPECT_EQ(record.property_queries[kBroken], 1);
}

TEST_CASE(devices_that_are_not_there_are_named) {
  for (const int device : {6, 255, 256, 100000}) {
    const attnres_probe_info info = attnres::probe(device);
    EXPECT_EQ(info.native, 0);
    const std::string wanted = "no CUDA device " + std::to_string(device);
    EXPECT_EQ(std::string(info.reason).substr(0, wanted.size()), wanted);
    const auto [status, message] =
        outcome_of([&] { attnres::device_forward(call_on(device, ATTNRES_KERNEL_RING), nullptr); });
    EXPECT(status != ATTNRES_OK);
    EXPECT_EQ(current_device, 0);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
}

TEST_CASE(a_call_runs_on_its_own_device_and_leaves_the_current_one) {
  for (const int current : {kHopper, kBlackwell, kAda, kSlice}) {
    for (const int device : {kHopper, kBlackwell, kSlice}) {
      for (const int32_t kernel : {ATTNRES_KERNEL_RING, ATTNRES_KERNEL_CLUSTER}) {
        forget_launches();
        current_device = current;
        attnres::device_forward(call_on(device, kernel), stream_number(7));
        EXPECT_EQ(current_device, current);
        EXPECT_EQ(record.launches.size(), size_t{1});
        const Launch& launch = record.launches.front();
        EXPECT_EQ(launch.device, device);
        EXPECT(launch.stream == stream_number(7));
        const attnres_plan_info plan = attnres::plan_on_device(call_on(device, kernel));
        EXPECT_EQ(static_cast<int32_t>(launch.grid_size), plan.grid_size);
        // Persistent blocks: as many as this device has room for, not the current one.
        if (kernel == ATTNRES_KERNEL_RING) {
          EXPECT_EQ(plan.grid_size, kDevices[device].num_sms * plan.ctas_per_sm);
        }
      }
    }
  }
  current_device = kBlackwell;
  forget_launches();
  attnres::device_forward(call_on(-1, ATTNRES_KERNEL_RING), nullptr);
  EXPECT_EQ(record.launches.front().device, kBlackwell);
  current_device = 0;
}

TEST_CASE(a_device_without_kernels_is_refused_whatever_is_current) {
  for (const int current : {kHopper, kAda}) {
    current_device = current;
    forget_launches();
    const auto [status, message] =
        outcome_of([] { attnres::device_forward(call_on(kAda, ATTNRES_KERNEL_RING), nullptr); });
    EXPECT_EQ(status, ATTNRES_UNSUPPORTED);
    EXPECT(message.find("8.9") != std::string::npos);
    EXPECT_EQ(record.launches.size(), size_t{0});
    EXPECT_EQ(current_device, current);
  }
  current_device = 0;
}

TEST_CASE(a_kernel_is_prepared_on_every_device_and_once) {
  for (int round = 0; round < 3; ++round) {
    for (const int device : {kHopper, kBlackwell, kSlice}) {
      attnres::device_forward(call_on(device, ATTNRES_KERNEL_RING), nullptr);
      attnres::device_forward(call_on(device, ATTNRES_KERNEL_CLUSTER), nullptr);
    }
  }
  for (const int device : {kHopper, kBlackwell, kSlice}) attnres::warmup(device);
  for (const attnres::Instance& instance : attnres::instances()) {
    const bool ring = instance.permutation.kernel == ATTNRES_KERNEL_RING;
    for (const int device : {kHopper, kBlackwell, kSlice}) {
      EXPECT_EQ((record.limits[{instance.function(), device}]), ring ? 1 : 0);
      EXPECT((record.loads[{instance.function(), device}]) > 0);
    }
    EXPECT_EQ((record.limits[{instance.function(), kAda}]), 0);
  }
  for (const int device : {kHopper, kBlackwell, kSlice}) {
    for (const attnres::MergeEntry& entry : attnres::merge_kernels()) {
      const auto* function = reinterpret_cast<const void*>(entry.get().function);
      EXPECT_EQ((record.limits[{function, device}]), entry.kernel == ATTNRES_KERNEL_RING ? 1 : 0);
      EXPECT_EQ((record.loads[{function, device}]), 1);
    }
    for (const attnres::BankEntry& entry : attnres::bank_kernels()) {
      const auto* function = reinterpret_cast<const void*>(entry.get().function);
      EXPECT_EQ((record.limits[{function, device}]), 1);
      EXPECT_EQ((record.loads[{function, device}]), 1);
    }
    EXPECT_EQ(record.cluster_queries[device], 1);
  }
}

// --- the two phases ------------------------------------------------------------------------------

TEST_CASE(every_site_of_every_entry_is_one_clusters) {
  for (const int device : {kHopper, kBlackwell, kSlice}) {
    for (const int32_t tokens : {1, 2, 3, 7, 8, 9, 16, 31, 131, 1024}) {
      for (const int32_t sites : {1, 7, 8, 9, 24, 25, 48, 100, 1024}) {
        for (const int32_t wanted : {0, 1, 3, 1000}) {
          attnres_bank_args args = bank_on(device, tokens, sites);
          args.num_clusters = wanted;
          const Launch launch = launch_of(args);
          const attnres::BankParams& params = launch.bank;
          const auto clusters = static_cast<int32_t>(launch.grid_size) / attnres::kBankClusterSize;
          EXPECT_EQ(launch.grid_size % (attnres::kBankClusterSize * params.parts), 0u);
          EXPECT(clusters >= params.parts);
          if (wanted == 0) EXPECT(clusters <= std::max(resident_clusters(device), params.parts));
          if (wanted != 0) EXPECT_EQ(clusters, std::min(wanted, tokens) * params.parts);
          EXPECT(params.sites_per_part >= 1 && params.sites_per_part <= attnres::kBankSitesPerPart);
          // With one entry a group nobody waits for the second softmax warp of the kernel, so there must be no
          // second group.
          EXPECT_EQ(params.entries_per_group, std::min(attnres::kBankEntriesPerGroup, tokens));
          std::vector<unsigned char> taken(size_t{1} * tokens * sites);
          bool inside = true;
          for (int32_t cluster = 0; cluster < clusters; ++cluster) {
            const attnres::BankShare share(params, cluster, clusters);
            inside = inside && share.sites >= 1 && share.site + share.sites <= sites &&
                     share.sites <= attnres::kBankSitesPerPart;
            attnres::BankShare::Group group;
            int32_t round = 0;
            for (; share.group_of(round, group); ++round) {
              inside = inside && group.token >= 0 && group.token + group.entries <= tokens &&
                       group.entries <= params.entries_per_group;
              for (int32_t i = 0; inside && i < group.entries * share.sites; ++i) {
                ++taken[size_t{1} * (group.token + i / share.sites) * sites + share.site +
                        i % share.sites];
              }
            }
            inside = inside && !share.group_of(round + 1, group);
          }
          EXPECT(inside);
          EXPECT(taken == std::vector<unsigned char>(taken.size(), 1));
        }
      }
    }
  }
}

TEST_CASE(a_bank_pass_splits_sites_where_tokens_are_few_and_fills_the_gpu) {
  struct Expected {
    int32_t tokens, sites, parts, sites_per_part, entries_per_group, clusters_per_part;
  };
  for (const Expected& expected : {Expected{1, 1, 1, 1, 1, 1},
                                   {1, 24, 3, 8, 1, 1},
                                   {1, 25, 4, 7, 1, 1},
                                   {8, 9, 2, 5, 2, 4},
                                   {8, 24, 3, 8, 2, 4},
                                   {9, 24, 1, 24, 2, 5},
                                   {16, 25, 2, 13, 2, 7},
                                   {1024, 24, 1, 24, 2, 15},
                                   {1024, 100, 5, 20, 2, 3},
                                   {1024, 1024, 43, 24, 2, 1}}) {
    const Launch launch = launch_of(bank_on(kHopper, expected.tokens, expected.sites));
    EXPECT_EQ(launch.bank.parts, expected.parts);
    EXPECT_EQ(launch.bank.sites_per_part, expected.sites_per_part);
    EXPECT_EQ(launch.bank.entries_per_group, expected.entries_per_group);
    EXPECT_EQ(static_cast<int32_t>(launch.grid_size),
              8 * expected.parts * expected.clusters_per_part);
  }
}

TEST_CASE(a_bank_pass_passes_on_what_it_was_given) {
  for (const int32_t float32_bank : {0, 1}) {
    for (const int32_t pdl : {ATTNRES_PDL_OFF, ATTNRES_PDL_WAIT, ATTNRES_PDL_EARLY}) {
      attnres_bank_args args = bank_on(kBlackwell, 40, 24);
      args.float32_bank = float32_bank;
      args.pdl = pdl;
      args.num_blocks = 5;
      args.eps = 0.25f;
      args.blocks_token_stride = 11;
      args.blocks_row_stride = 12;
      args.norm_weights_stride = 13;
      args.qk_weights_stride = 14;
      args.bank_site_stride = 15;
      args.bank_token_stride = 16;
      args.lse_stride = 17;
      const Launch launch = launch_of(args);
      const attnres::BankEntry* entry = attnres::find_bank(7168, float32_bank != 0);
      EXPECT(launch.function == reinterpret_cast<const void*>(entry->get().function));
      EXPECT_EQ(launch.device, kBlackwell);
      EXPECT(launch.stream == stream_number(3));
      EXPECT_EQ(launch.block_size, 640u);
      EXPECT_EQ(launch.shared_memory, 230000u);
      EXPECT_EQ(launch.programmatic, pdl != ATTNRES_PDL_OFF);
      const attnres::BankParams& params = launch.bank;
      EXPECT(params.blocks == memory && params.bank == memory && params.norm_weights == memory &&
             params.qk_weights == memory && params.lse == args.lse);
      EXPECT_EQ(params.num_tokens, 40);
      EXPECT_EQ(params.num_blocks, 5);
      EXPECT_EQ(params.num_sites, 24);
      EXPECT_EQ(params.eps, 0.25f);
      EXPECT_EQ(params.blocks_token_stride, 11);
      EXPECT_EQ(params.blocks_row_stride, 12);
      EXPECT_EQ(params.norm_weights_stride, 13);
      EXPECT_EQ(params.qk_weights_stride, 14);
      EXPECT_EQ(params.bank_site_stride, 15);
      EXPECT_EQ(params.bank_token_stride, 16);
      EXPECT_EQ(params.lse_stride, 17);
      EXPECT_EQ(current_device, 0);
    }
  }
}

TEST_CASE(a_merge_takes_the_kernel_of_its_row_of_the_plan) {
  constexpr int32_t kRowBytes = 7168 * 2;
  for (const int device : {kHopper, kBlackwell, kSlice}) {
    const FakeDevice& fake = kDevices[device];
    for (int32_t tokens = 1; tokens <= 8192; tokens += tokens < 600 ? 1 : 97) {
      const auto plan = attnres::builtin_merge_plan();
      const attnres::PlanRow* row = plan.data();
      while (tokens > row->max_entries_per_sm * fake.num_sms) ++row;
      const bool ring = row->kernel == ATTNRES_KERNEL_RING;
      const attnres::MergeEntry* entry = attnres::find_merge(
          {row->kernel, 7168, 1, row->cluster_size, false, true, true, nullptr});
      const attnres::MergeKernel kernel = entry->get();
      const Launch launch = launch_of(merge_on(device, tokens));
      EXPECT(launch.function == reinterpret_cast<const void*>(kernel.function));
      EXPECT_EQ(launch.block_size, kernel.block_size);
      EXPECT_EQ(static_cast<int32_t>(launch.cluster_size), row->cluster_size);
      EXPECT_EQ(
          static_cast<int32_t>(launch.grid_size),
          ring ? std::min(tokens, fake.num_sms * row->ctas_per_sm) : tokens * row->cluster_size);
      if (!ring) {
        EXPECT_EQ(launch.shared_memory, 0u);
        continue;
      }
      const int32_t rows = launch.merge.ring_rows;
      EXPECT(rows >= 2 && rows <= static_cast<int32_t>(kernel.max_ring_rows));
      EXPECT(rows <= std::max(2, row->rows_in_flight / row->ctas_per_sm));
      EXPECT_EQ(static_cast<int32_t>(launch.shared_memory), 2048 + rows * kRowBytes);
      EXPECT((launch.shared_memory + 1024) * row->ctas_per_sm <= 233472);
    }
  }
  EXPECT_EQ(launch_of(merge_on(kHopper, 8)).cluster_size, 7u);
  EXPECT_EQ(launch_of(merge_on(kHopper, 9)).cluster_size, 4u);
  EXPECT_EQ(launch_of(merge_on(kHopper, 33)).cluster_size, 2u);
  EXPECT_EQ(launch_of(merge_on(kHopper, 193)).cluster_size, 0u);
}

TEST_CASE(a_merge_passes_on_what_it_was_given) {
  attnres_merge_args args = merge_on(kHopper, 3000);
  args.blocks = memory + 1;
  args.bank = memory + 2;
  args.block_write_idx = 4;
  args.bank_stride = 11;
  args.prefix_stride = 12;
  args.delta_stride = 13;
  args.output_stride = 14;
  args.blocks_token_stride = 15;
  args.blocks_row_stride = 16;
  args.eps = 0.25f;
  args.output_norm_eps = 0.5f;
  for (const int32_t pdl : {ATTNRES_PDL_OFF, ATTNRES_PDL_WAIT, ATTNRES_PDL_EARLY}) {
    args.pdl = pdl;
    const Launch launch = launch_of(args);
    // A write is no static common path.
    EXPECT(launch.function ==
           reinterpret_cast<const void*>(&attnres::idle_merge<0, 7168, 1, false, true, false>));
    EXPECT_EQ(launch.programmatic, pdl != ATTNRES_PDL_OFF);
    const attnres::MergeParams& params = launch.merge;
    EXPECT_EQ(params.early != 0, pdl == ATTNRES_PDL_EARLY);
    EXPECT(params.blocks == args.blocks && params.bank == args.bank && params.lse == args.lse);
    EXPECT(params.prefix == memory && params.delta == memory && params.output == memory);
    EXPECT(params.norm_weight == memory && params.qk_weight == memory &&
           params.output_norm_weight == memory);
    EXPECT_EQ(params.num_tokens, 3000);
    EXPECT_EQ(params.block_write_idx, 4);
    EXPECT_EQ(params.bank_stride, 11);
    EXPECT_EQ(params.prefix_stride, 12);
    EXPECT_EQ(params.delta_stride, 13);
    EXPECT_EQ(params.output_stride, 14);
    EXPECT_EQ(params.blocks_token_stride, 15);
    EXPECT_EQ(params.blocks_row_stride, 16);
    EXPECT_EQ(params.eps, 0.25f);
    EXPECT_EQ(params.output_norm_eps, 0.5f);
  }
}

TEST_CASE(overrides_of_a_merge_choose_its_kernel_and_launch) {
  attnres_merge_args args = merge_on(kHopper, 5000);
  args.cluster_size = 4;
  EXPECT_EQ(launch_of(args).grid_size, 20000u);
  args = merge_on(kHopper, 1);
  args.kernel = ATTNRES_KERNEL_RING;
  args.rows_in_flight = 16;
  EXPECT_EQ(launch_of(args).cluster_size, 0u);
  EXPECT_EQ(launch_of(args).merge.ring_rows, 3);  // all that one token has
  args.float32_bank = 1;
  EXPECT_EQ(launch_of(args).merge.ring_rows, 4);  // its bank row takes two
  args = merge_on(kHopper, 5000);
  args.rows_per_stage = 1;  // the only one there is
  args.ctas_per_sm = 1;
  args.rows_in_flight = 5;
  EXPECT_EQ(launch_of(args).grid_size, 132u);
  EXPECT_EQ(launch_of(args).merge.ring_rows, 5);
  args = merge_on(kHopper, 2);  // two tokens of one bank entry: the ring kernel, whatever the batch
  args.num_bank_tokens = 1;
  EXPECT(launch_of(args).function ==
         reinterpret_cast<const void*>(&attnres::idle_merge<0, 7168, 2, false, true, true>));
  args = merge_on(kHopper, 5);
  args.batch_invariant = 1;
  EXPECT_EQ(launch_of(args).cluster_size, 0u);
}

TEST_CASE(what_no_merge_kernel_serves_is_refused) {
  const auto refused = [](const auto& change) {
    attnres_merge_args args = merge_on(kHopper, 600);
    change(args);
    return refusal(args, attnres::device_merge);
  };
  EXPECT_EQ(refused([](auto& args) { args.rows_per_stage = 2; }),
            "rows_per_stage: expected 1 in a merge, which has one bank row, got 2");
  EXPECT_EQ(refused([](auto& args) { args.hidden_size = 4096; }),
            "hidden_size: expected one that is compiled (7168), got 4096");
  EXPECT_EQ(refused([](auto& args) { args.num_bank_tokens = 200; }),
            "permutation: expected one that is compiled, got the ring kernel of a merge with "
            "hidden_size 7168, 3 prefixes per bank row");
  EXPECT_EQ(refused([](auto& args) { args.cluster_size = 3; }),
            "permutation: expected one that is compiled, got the cluster kernel of a merge with "
            "hidden_size 7168, 1 prefixes per bank row, cluster_size 3");
  EXPECT_EQ(refused([](auto& args) { args.ctas_per_sm = 3; }),
            "ctas_per_sm: expected at most 2 for the ring kernel of a merge with hidden_size 7168, "
            "1 prefixes per bank row, got 3");
  EXPECT_EQ(refused([](auto& args) {
              args.rows_in_flight = 3;
              args.ctas_per_sm = 2;
            }),
            "rows_in_flight: expected at least 4 with rows_per_stage 1 and ctas_per_sm 2, got 3");
  EXPECT_EQ(refused([](auto& args) {
              args.cluster_size = 4;
              args.rows_per_stage = 1;
            }),
            "kernel: expected the cluster kernel with cluster_size, got the ring kernel");
  EXPECT_EQ(refused([](auto& args) {
              args.cluster_size = 4;
              args.num_bank_tokens = 300;
            }),
            "permutation: expected one that is compiled, got the cluster kernel of a merge with "
            "hidden_size 7168, 2 prefixes per bank row, cluster_size 4");
  EXPECT_EQ(refused([](auto& args) {
              args.kernel = ATTNRES_KERNEL_CLUSTER;
              args.batch_invariant = 1;
            }),
            "cluster_size: expected one with the cluster kernel in a batch-invariant call, got 0");
  EXPECT_EQ(refused([](auto& args) { args.num_tokens = args.num_bank_tokens = int64_t{1} << 31; }),
            "num_tokens: expected at most 2147483647 on a device, got 2147483648");
}

TEST_CASE(what_no_bank_kernel_serves_is_refused) {
  for (const auto run : {attnres::device_bank, attnres::device_bank_floor}) {
    attnres_bank_args args = bank_on(kHopper, 1, 1);
    args.hidden_size = 4096;
    EXPECT_EQ(refusal(args, run), "hidden_size: expected one that is compiled (7168), got 4096");
    args = bank_on(kHopper, (int64_t{1} << 30) + 1, 1);
    EXPECT_EQ(refusal(args, run),
              "num_bank_tokens: expected at most 1073741824 on a device, got 1073741825");
    EXPECT(refusal(bank_on(kAda, 1, 1), run).find("8.9") != std::string::npos);
  }
  EXPECT(refusal(merge_on(kAda, 1), attnres::device_merge).find("8.9") != std::string::npos);
}

TEST_CASE(a_bank_pass_that_fails_is_tried_again) {
  attnres_bank_args args = bank_on(kFull, 100, 24);
  attnres::probe(kFull);
  for (cudaError_t* failure :
       {&record.next_load, &record.next_limit, &record.next_clusters, &record.next_launch}) {
    forget_launches();
    *failure = cudaErrorMemoryAllocation;
    EXPECT_EQ(outcome_of([&] { attnres::device_bank(args, nullptr); }).first, ATTNRES_CUDA_ERROR);
    EXPECT_EQ(record.launches.size(), size_t{0});
    EXPECT_EQ(current_device, 0);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  EXPECT_EQ(launch_of(args).grid_size, 120u);
  EXPECT_EQ(record.cluster_queries[kFull], 1);
}
