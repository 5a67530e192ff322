// SPDX-License-Identifier: Apache-2.0
// The eager fast path: plain tensors -> attnres_forward_args without reading a tensor's attributes in
// Python, which costs 50 to 150 ns each, some fifty of them a call.
//
// It goes through the DLPack exchange API that a tensor type may publish as
// `__dlpack_c_exchange_api__` (PyTorch >= 2.10): one C call describes a tensor, with no torch header.
// Whatever is not plainly servable here (a subclass, a device or dtype mix, a shape that disagrees) is left
// to the caller's slow path, which knows how to say what is wrong.
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "attnres/attnres.h"
#include "call_args.hpp"
#include "status.hpp"

namespace attnres::bindings {

// The part of DLPack's stable ABI (1.3, https://github.com/dmlc/dlpack) that is called here.
namespace dlpack {

constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;
constexpr uint8_t kBfloat = 4;
constexpr uint32_t kMajor = 1;

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* tensor);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace dlpack

// What bind_tensors() was given; written once, at import, with the GIL held.
struct TensorTypes {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  PyCFunction is_neg = nullptr;  // Tensor.is_neg(self, NULL), past the lookup and the call protocol
  const dlpack::ExchangeApi* api = nullptr;
};
inline TensorTypes tensor_types;

// The C function behind a method of a type that takes no arguments, or null.
inline PyCFunction method_of(PyObject* type, const char* name) {
  PyObject* method = PyObject_GetAttrString(type, name);
  PyCFunction function = nullptr;
  if (method == nullptr) {
    PyErr_Clear();
  } else if (Py_IS_TYPE(method, &PyMethodDescr_Type)) {
    const PyMethodDef* definition = reinterpret_cast<PyMethodDescrObject*>(method)->d_method;
    if (definition->ml_flags == METH_NOARGS) function = definition->ml_meth;
  }
  Py_XDECREF(method);
  return function;
}

inline PyObject* bind_tensors(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  if (count != 3 || !PyType_Check(objects[0]) || !PyType_Check(objects[1])) {
    PyErr_SetString(PyExc_TypeError,
                    "expected (tensor type, parameter type, exchange API capsule)");
    return nullptr;
  }
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(objects[2], "dlpack_exchange_api"));
  if (api == nullptr) return nullptr;
  const PyCFunction is_neg = method_of(objects[0], "is_neg");
  if (api->major != dlpack::kMajor || api->tensor_from_object == nullptr ||
      api->current_stream == nullptr || is_neg == nullptr) {
    Py_RETURN_FALSE;
  }
  Py_INCREF(objects[0]);
  Py_INCREF(objects[1]);
  tensor_types = {reinterpret_cast<PyTypeObject*>(objects[0]),
                  reinterpret_cast<PyTypeObject*>(objects[1]), is_neg, api};
  Py_RETURN_TRUE;
}

// One tensor of a call, checked against the first.
class TensorReader {
 public:
  // A described strided tensor of `ndim` dimensions like the first one, last stride 1.
  bool read(PyObject* object, int32_t ndim, dlpack::Tensor* tensor) {
    const PyTypeObject* type = Py_TYPE(object);
    if (type != tensor_types.tensor && type != tensor_types.parameter) return false;
    if (tensor_types.api->tensor_from_object(object, tensor) != 0) {
      PyErr_Clear();  // sparse, or not backed by memory: the slow path says so
      return false;
    }
    if (tensor->ndim != ndim || tensor->byte_offset != 0 || tensor->dtype_lanes != 1) return false;
    if (tensor->shape[ndim - 1] > 1 && tensor->strides[ndim - 1] != 1) return false;
    // The library takes a null pointer for an absent argument; a tensor whose storage was freed has one.
    if (tensor->data == nullptr || has_negative_bit(object)) return false;
    if (first_) {
      first_ = false;
      device_type_ = tensor->device_type;
      device_id_ = tensor->device_id;
      dtype_code_ = tensor->dtype_code;
      dtype_bits_ = tensor->dtype_bits;
      return true;
    }
    return tensor->device_type == device_type_ && tensor->device_id == device_id_ &&
           tensor->dtype_code == dtype_code_ && tensor->dtype_bits == dtype_bits_;
  }

  // A `[hidden_size]` vector.
  bool read_weight(PyObject* object, int64_t hidden_size, const void** data) {
    dlpack::Tensor weight;
    if (!read(object, 1, &weight) || weight.shape[0] != hidden_size) return false;
    *data = weight.data;
    return true;
  }

  // The native kernels' dtype; others take the slow path.
  bool is_bfloat16() const { return dtype_code_ == dlpack::kBfloat && dtype_bits_ == 16; }

  int32_t device_type() const { return device_type_; }
  int32_t device_id() const { return device_id_; }

 private:
  // DLPack does not show it: memory that holds the negatives of the values. True also on an error.
  static bool has_negative_bit(PyObject* object) {
    PyObject* answer = tensor_types.is_neg(object, nullptr);
    if (answer == nullptr) PyErr_Clear();
    const bool negative = answer != Py_False;
    Py_XDECREF(answer);
    return negative;
  }

  bool first_ = true;
  int32_t device_type_ = 0;
  int32_t device_id_ = 0;
  uint8_t dtype_code_ = 0;
  uint8_t dtype_bits_ = 0;
};

// The stride of a dimension of extent 0 or 1 means nothing; the dense one satisfies every check.
inline int64_t meaningful_stride(const dlpack::Tensor& tensor, int dimension, int64_t dense) {
  return tensor.shape[dimension] > 1 ? tensor.strides[dimension] : dense;
}

// Exact ints and floats alone: a bool index is an error that the slow path names.
inline bool read_int(PyObject* object, int32_t* value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  const long wide = PyLong_AsLongAndOverflow(object, &overflow);
  *value = static_cast<int32_t>(wide);
  return overflow == 0 && *value == wide;
}

inline bool read_float(PyObject* object, float* value) {
  if (!PyFloat_CheckExact(object)) return false;
  *value = static_cast<float>(PyFloat_AS_DOUBLE(object));
  return true;
}

inline bool read_pdl(PyObject* object, int32_t* pdl) {
  if (!PyUnicode_CheckExact(object)) return false;
  if (PyUnicode_CompareWithASCIIString(object, "wait") == 0) {
    *pdl = ATTNRES_PDL_WAIT;
  } else if (PyUnicode_CompareWithASCIIString(object, "early") == 0) {
    *pdl = ATTNRES_PDL_EARLY;
  } else if (PyUnicode_CompareWithASCIIString(object, "off") == 0) {
    *pdl = ATTNRES_PDL_OFF;
  } else {
    return false;
  }
  return true;
}

// None, False or True.
inline bool read_batch_invariant(PyObject* object, int32_t* batch_invariant) {
  if (object == Py_None) return true;
  if (!PyBool_Check(object)) return false;
  *batch_invariant = object == Py_True ? 1 : -1;
  return true;
}

enum class Backend { kAuto, kNative, kHost, kOther };

// The forced backend, if it is one that runs here. The environment is asked on every call, as documented;
// Python's os.environ keeps the C environment up to date.
inline Backend read_backend(PyObject* object) {
  if (object == Py_None) {
    const char* forced = std::getenv("LIBATTNRES_BACKEND");
    if (forced == nullptr || *forced == '\0') return Backend::kAuto;
    if (std::strcmp(forced, "native") == 0) return Backend::kNative;
    if (std::strcmp(forced, "host") == 0) return Backend::kHost;
    return std::strcmp(forced, "auto") == 0 ? Backend::kAuto : Backend::kOther;
  }
  if (!PyUnicode_CheckExact(object)) return Backend::kOther;
  if (PyUnicode_CompareWithASCIIString(object, "auto") == 0) return Backend::kAuto;
  if (PyUnicode_CompareWithASCIIString(object, "native") == 0) return Backend::kNative;
  if (PyUnicode_CompareWithASCIIString(object, "host") == 0) return Backend::kHost;
  return Backend::kOther;
}

// Fills `args` from (prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks,
// block_write_idx, eps, output_norm_eps, out, pdl, backend, batch_invariant); false when the call is for the slow path.
inline bool read_call(PyObject* const* objects, TensorReader* reader, attnres_forward_args* args) {
  dlpack::Tensor prefix, delta, blocks, output;
  if (!reader->read(objects[0], 2, &prefix) || !reader->read(objects[2], 3, &blocks)) return false;
  const int64_t num_tokens = prefix.shape[0];
  const int64_t hidden_size = prefix.shape[1];
  if (!reader->is_bfloat16() || blocks.shape[2] != hidden_size) return false;
  if (!reader->read(objects[10], 2, &output) || output.shape[0] != num_tokens ||
      output.shape[1] != hidden_size) {
    return false;
  }
  if (objects[1] != Py_None) {
    if (!reader->read(objects[1], 2, &delta) || delta.shape[0] != num_tokens ||
        delta.shape[1] != hidden_size) {
      return false;
    }
    args->delta = delta.data;
    args->delta_stride = meaningful_stride(delta, 0, hidden_size);
  }
  if (!reader->read_weight(objects[3], hidden_size, &args->norm_weight) ||
      !reader->read_weight(objects[4], hidden_size, &args->qk_weight)) {
    return false;
  }
  if (objects[5] != Py_None &&
      !reader->read_weight(objects[5], hidden_size, &args->output_norm_weight)) {
    return false;
  }
  args->num_tokens = num_tokens;
  args->num_bank_tokens = blocks.shape[0];
  args->num_bank_rows = blocks.shape[1];
  args->hidden_size = hidden_size;
  args->prefix = prefix.data;
  args->blocks = blocks.data;
  args->output = output.data;
  args->prefix_stride = meaningful_stride(prefix, 0, hidden_size);
  args->blocks_row_stride = meaningful_stride(blocks, 1, hidden_size);
  args->blocks_token_stride =
      meaningful_stride(blocks, 0, blocks.shape[1] * args->blocks_row_stride);
  args->output_stride = meaningful_stride(output, 0, hidden_size);
  return read_int(objects[6], &args->num_blocks) && read_int(objects[7], &args->block_write_idx) &&
         read_float(objects[8], &args->eps) && read_float(objects[9], &args->output_norm_eps) &&
         read_pdl(objects[11], &args->pdl) &&
         read_batch_invariant(objects[13], &args->batch_invariant);
}

// forward_tensors(prefix, ..., out, pdl, backend, batch_invariant) -> True when the call was served, False
// when it is for the slow path. Nothing is written before either False or an exception.
inline PyObject* forward_tensors(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  if (count != 14) {
    PyErr_Format(PyExc_TypeError, "expected 14 positional arguments, got %zd", count);
    return nullptr;
  }
  if (tensor_types.api == nullptr) Py_RETURN_FALSE;
  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  TensorReader reader;
  const Backend backend = read_backend(objects[12]);
  if (backend == Backend::kOther || !read_call(objects, &reader, &args)) Py_RETURN_FALSE;

  attnres_status status = ATTNRES_OK;
  if (reader.device_type() == dlpack::kCuda && backend != Backend::kHost) {
    void* stream = nullptr;
    if (tensor_types.api->current_stream(dlpack::kCuda, reader.device_id(), &stream) != 0) {
      return nullptr;
    }
    args.device = reader.device_id();
    Py_BEGIN_ALLOW_THREADS;
    status = attnres_forward(&args, static_cast<CUstream_st*>(stream));
    Py_END_ALLOW_THREADS;
  } else if (reader.device_type() == dlpack::kCpu && backend != Backend::kNative) {
    Py_BEGIN_ALLOW_THREADS;
    status = attnres_forward_host(&args);
    Py_END_ALLOW_THREADS;
  } else {
    Py_RETURN_FALSE;
  }
  if (status == ATTNRES_OK) Py_RETURN_TRUE;
  // The slow path knows the next backend, and says what is wrong in the names of the Python call.
  if (status == ATTNRES_UNSUPPORTED || status == ATTNRES_INVALID_ARGUMENT) Py_RETURN_FALSE;
  set_exception(status);
  return nullptr;
}

}  // namespace attnres::bindings
