// SPDX-License-Identifier: Apache-2.0
// What the ops of libattnres_torch.so share: types, options, and what the C interface cannot see of a tensor,
// since it takes pointers, sizes and strides.
#pragma once

#include <attnres/attnres.h>
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace attnres_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalString = std::optional<std::string>;
using OptionalInts = std::optional<std::vector<int64_t>>;
using OptionalBool = std::optional<bool>;

// What every op has after its tensors and indices.
struct Options {
  double eps;
  double output_norm_eps;
  const OptionalString& backend;
  const std::string& pdl;
  const OptionalInts& plan;
  OptionalBool batch_invariant;
};

inline int32_t dtype_of(const Tensor& prefix, const char* name = "prefix") {
  switch (prefix.scalar_type()) {
    case ScalarType::BFloat16:
      return ATTNRES_BFLOAT16;
    case ScalarType::Half:
      return ATTNRES_FLOAT16;
    case ScalarType::Float:
      return ATTNRES_FLOAT32;
    default:
      STD_TORCH_CHECK(false, name, ": expected bfloat16, float16 or float32, got another dtype");
  }
  return -1;
}

inline int32_t index_of(const char* name, int64_t value) {
  STD_TORCH_CHECK(
      value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max(),
      name, ": expected a 32-bit integer, got ", value);
  return static_cast<int32_t>(value);
}

inline void check_device(const char* name, const Tensor& tensor, const char* first_name,
                         const Tensor& first) {
  STD_TORCH_CHECK(tensor.is_cuda() == first.is_cuda() && tensor.is_cpu() == first.is_cpu() &&
                      tensor.get_device_index() == first.get_device_index(),
                  name, ": expected the device of ", first_name, ", got another");
}

// Rank, dtype, device and last dimension; `first` is the argument that the others go with.
inline void check_like(const char* name, const Tensor& tensor, const char* first_name,
                       const Tensor& first, int64_t rank, bool may_be_float32 = false) {
  STD_TORCH_CHECK(tensor.dim() == rank, name, ": expected ", rank, " dimensions, got ",
                  tensor.dim());
  STD_TORCH_CHECK(tensor.scalar_type() == first.scalar_type() ||
                      (may_be_float32 && tensor.scalar_type() == ScalarType::Float),
                  name, ": expected the dtype of ", first_name, may_be_float32 ? " or float32" : "",
                  ", got another");
  check_device(name, tensor, first_name, first);
  const int64_t hidden_size = first.size(first.dim() - 1);
  STD_TORCH_CHECK(tensor.size(rank - 1) == hidden_size, name, ": expected a last dimension of ",
                  hidden_size, " as ", first_name, " has, got ", tensor.size(rank - 1));
  STD_TORCH_CHECK(hidden_size <= 1 || tensor.stride(rank - 1) == 1, name,
                  ": expected last stride 1, got ", tensor.stride(rank - 1));
}

// Of a dimension with one element any stride will do, and torch keeps an arbitrary one.
inline int64_t stride_of(const Tensor& tensor, int64_t dimension, int64_t dense) {
  return tensor.size(dimension) > 1 ? tensor.stride(dimension) : dense;
}

inline int32_t pdl_of(const std::string& pdl) {
  if (pdl == "wait") return ATTNRES_PDL_WAIT;
  if (pdl == "early") return ATTNRES_PDL_EARLY;
  if (pdl == "off") return ATTNRES_PDL_OFF;
  STD_TORCH_CHECK(false, "pdl: expected one of 'wait', 'early', 'off', got '", pdl, "'");
  return -1;
}

// Whether the call runs natively rather than on the host; refuses a backend that is not here.
inline bool is_native(const Tensor& prefix, const Options& options, const char* name = "prefix") {
  const bool on_cuda = prefix.is_cuda();
  STD_TORCH_CHECK(on_cuda || prefix.is_cpu(), name, ": expected a CPU or CUDA tensor, got another");
  const char* variable = std::getenv("LIBATTNRES_BACKEND");
  std::string backend = "auto";
  if (options.backend.has_value()) {
    backend = *options.backend;
  } else if (options.plan.has_value()) {
    backend = "native";
  } else if (variable != nullptr && *variable != '\0') {
    backend = variable;
  }
  const char* only = on_cuda ? "native" : "host";
  STD_TORCH_CHECK(backend == "auto" || backend == only, "backend: expected 'auto' or '", only,
                  "' for ", on_cuda ? "CUDA" : "CPU", " tensors without Python, got '", backend,
                  "'");
  return on_cuda;
}

// Looked up in libtorch_cuda.so, which a CPU build of PyTorch does not have.
inline CUstream_st* current_cuda_stream(int32_t device) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol =
        dlsym(library == nullptr ? RTLD_DEFAULT : library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Get>(symbol);
  }();
  STD_TORCH_CHECK(get != nullptr, "prefix: expected a CUDA build of PyTorch, got one without");
  void* stream = nullptr;
  STD_TORCH_CHECK(get(device, &stream) == AOTI_TORCH_SUCCESS, "PyTorch gave no CUDA stream");
  return static_cast<CUstream_st*>(stream);
}

inline Tensor copy(Tensor rows) {
  Tensor dense = torch::stable::new_empty(rows, rows.sizes());
  return torch::stable::copy_(dense, rows);
}

inline bool is_same_memory(const Tensor& left, const Tensor& right) {
  return left.numel() > 0 && left.data_ptr() == right.data_ptr() && left.dim() == right.dim() &&
         left.size(0) == right.size(0) && left.stride(0) == right.stride(0);
}

// A trace hands over the base of what is written, and where that lies in it: sizes, strides, and elements
// from the start of the base.
inline Tensor at_place(const char* name, const Tensor& base, const OptionalInts& place) {
  if (!place.has_value() || place->empty()) return base;
  const size_t rank = place->size() / 2;
  STD_TORCH_CHECK(place->size() == 2 * rank + 1, name,
                  "_place: expected an odd number of integers, got ", place->size());
  AtenTensorHandle view = nullptr;
  const AOTITorchError status =
      aoti_torch__reinterpret_tensor(base.get(), static_cast<int64_t>(rank), place->data(),
                                     place->data() + rank, place->back(), &view);
  STD_TORCH_CHECK(status == AOTI_TORCH_SUCCESS, name, "_place: PyTorch made no view of it");
  return Tensor(view);
}

}  // namespace attnres_torch
