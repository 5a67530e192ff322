// SPDX-License-Identifier: Apache-2.0
// What the host side does for each of several GPUs, without one: the CUDA runtime and the kernels of the
// registry are replaced by the ones below, which keep a record. Internal functions, so compiled in.
#include <cuda_runtime_api.h>

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "device.hpp"
#include "device_forward.hpp"
#include "error.hpp"
#include "registry.hpp"
#include "test_runner.hpp"

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
};

// What the fake runtime has seen. Failures happen once each.
struct Record {
  std::mutex mutex;
  std::map<std::pair<const void*, int>, int> loads, limits;  // by function and device
  std::vector<Launch> launches;
  std::map<int, int> property_queries;  // by device
  cudaError_t next_device = cudaSuccess, next_load = cudaSuccess, next_limit = cudaSuccess,
              next_launch = cudaSuccess;
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

cudaError_t record_launch(const void* function, uint32_t grid_size, cudaStream_t stream) {
  const std::lock_guard lock(record.mutex);
  const cudaError_t code = take(record.next_launch);
  if (code == cudaSuccess) {
    record.launches.push_back({function, current_device, stream, grid_size});
  }
  return code;
}

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

// Memory is never touched: these launch nothing.
attnres_forward_args call_on(int device, int32_t kernel, int64_t num_tokens = 1000) {
  static unsigned char memory[16];
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

cudaStream_t stream_number(uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); }

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
}
