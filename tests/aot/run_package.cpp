// SPDX-License-Identifier: Apache-2.0
// Runs an AOTInductor package in a process without Python:
//   run_package LIBATTNRES_TORCH PACKAGE M R H CPU|CUDA
// Reads prefix, delta and blocks (bfloat16) from standard input; writes the two outputs, then prefix and
// blocks after the run, to standard output.
#include <ATen/Functions.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

namespace {

at::Tensor read(at::IntArrayRef shape) {
  at::Tensor tensor = at::empty(shape, at::TensorOptions(at::kBFloat16));
  if (std::fread(tensor.data_ptr(), tensor.nbytes(), 1, stdin) != 1) std::exit(3);
  return tensor;
}

void write(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.cpu().contiguous();
  std::fwrite(dense.data_ptr(), dense.nbytes(), 1, stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  if (dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  try {
    const int64_t M = std::atoll(argv[3]), R = std::atoll(argv[4]), H = std::atoll(argv[5]);
    const c10::DeviceType device = std::string(argv[6]) == "CUDA" ? at::kCUDA : at::kCPU;
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& input : {read({M, H}), read({M, H}), read({M, R, H})}) {
      inputs.push_back(input.to(device));
    }
    torch::inductor::AOTIModelPackageLoader package(argv[2]);
    for (const at::Tensor& output : package.run(inputs)) write(output);
    write(inputs[0]);
    write(inputs[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
