// SPDX-License-Identifier: Apache-2.0
// One fault for each sanitizer, which must report it: a tool that is silent about this program says nothing
// about another one. Usage: sanitizer_faults memcheck|racecheck|synccheck|initcheck
#include <cstdio>
#include <cstring>

namespace {

constexpr int kThreads = 64;

__global__ void write_out_of_bounds(int* data) { data[kThreads + threadIdx.x] = 1; }

__global__ void race(int* data) {
  __shared__ int values[kThreads];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  data[threadIdx.x] = values[(threadIdx.x + 32) % kThreads];  // of the other warp, no barrier
}

__global__ void diverge(int* data) {
  if (threadIdx.x < kThreads - 16) __syncthreads();
  data[threadIdx.x] = 1;
}

__global__ void read_uninitialised(const int* source, int* data) {
  data[threadIdx.x] = source[threadIdx.x] + 1;
}

}  // namespace

int main(int argc, char** argv) {
  const char* fault = argc > 1 ? argv[1] : "";
  int *data = nullptr, *source = nullptr;
  if (cudaMalloc(&data, kThreads * sizeof(int)) != cudaSuccess ||
      cudaMalloc(&source, kThreads * sizeof(int)) != cudaSuccess) {
    std::printf("no memory on a CUDA device\n");
    return 1;
  }
  if (std::strcmp(fault, "memcheck") == 0) {
    write_out_of_bounds<<<1, kThreads>>>(data);
  } else if (std::strcmp(fault, "racecheck") == 0) {
    race<<<1, kThreads>>>(data);
  } else if (std::strcmp(fault, "synccheck") == 0) {
    diverge<<<1, kThreads>>>(data);
  } else if (std::strcmp(fault, "initcheck") == 0) {
    read_uninitialised<<<1, kThreads>>>(source, data);
  } else {
    std::printf("usage: sanitizer_faults memcheck|racecheck|synccheck|initcheck\n");
    return 2;
  }
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
