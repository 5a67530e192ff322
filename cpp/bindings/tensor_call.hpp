// SPDX-License-Identifier: Apache-2.0
// The eager fast path: plain tensors -> the struct of the C ABI without reading a tensor's attributes in
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
constexpr uint8_t kFloat = 2;
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
    if (!describe(object, ndim, tensor)) return false;
    if (first_) {
      first_ = false;
      device_type_ = tensor->device_type;
      device_id_ = tensor->device_id;
      dtype_code_ = tensor->dtype_code;
      dtype_bits_ = tensor->dtype_bits;
      return true;
    }
    return is_near(*tensor) && has_same_dtype(*tensor);
  }

  // The same, but float32 whatever the first one is.
  bool read_float32(PyObject* object, int32_t ndim, dlpack::Tensor* tensor) {
    return describe(object, ndim, tensor) && is_near(*tensor) && is_float32(*tensor);
  }

  // The same, either way.
  bool read_same_or_float32(PyObject* object, int32_t ndim, dlpack::Tensor* tensor) {
    return describe(object, ndim, tensor) && is_near(*tensor) &&
           (has_same_dtype(*tensor) || is_float32(*tensor));
  }

  bool has_same_dtype(const dlpack::Tensor& tensor) const {
    return tensor.dtype_code == dtype_code_ && tensor.dtype_bits == dtype_bits_;
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
  static bool is_float32(const dlpack::Tensor& tensor) {
    return tensor.dtype_code == dlpack::kFloat && tensor.dtype_bits == 32;
  }

  bool is_near(const dlpack::Tensor& tensor) const {
    return tensor.device_type == device_type_ && tensor.device_id == device_id_;
  }

  bool describe(PyObject* object, int32_t ndim, dlpack::Tensor* tensor) const {
    const PyTypeObject* type = Py_TYPE(object);
    if (type != tensor_types.tensor && type != tensor_types.parameter) return false;
    if (tensor_types.api->tensor_from_object(object, tensor) != 0) {
      PyErr_Clear();  // sparse, or not backed by memory: the slow path says so
      return false;
    }
    if (tensor->ndim != ndim || tensor->byte_offset != 0 || tensor->dtype_lanes != 1) return false;
    if (tensor->shape[ndim - 1] > 1 && tensor->strides[ndim - 1] != 1) return false;
    // The library takes a null pointer for an absent argument; a tensor whose storage was freed has one.
    return tensor->data != nullptr && !has_negative_bit(object);
  }

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

// Reads rows `[num_tokens, hidden_size]`.
inline bool read_rows(PyObject* object, TensorReader* reader, int64_t num_tokens,
                      int64_t hidden_size, const void** data, int64_t* stride) {
  dlpack::Tensor rows;
  if (!reader->read(object, 2, &rows) || rows.shape[0] != num_tokens ||
      rows.shape[1] != hidden_size) {
    return false;
  }
  *data = rows.data;
  *stride = meaningful_stride(rows, 0, hidden_size);
  return true;
}

// What the calls of one and of two phases share.
template <typename Args>
bool read_prefix(PyObject* prefix, PyObject* delta, PyObject* output, TensorReader* reader,
                 Args* args) {
  dlpack::Tensor rows;
  if (!reader->read(prefix, 2, &rows) || !reader->is_bfloat16()) return false;
  args->num_tokens = rows.shape[0];
  args->hidden_size = rows.shape[1];
  args->prefix = rows.data;
  args->prefix_stride = meaningful_stride(rows, 0, rows.shape[1]);
  const void* written = nullptr;
  if (!read_rows(output, reader, args->num_tokens, args->hidden_size, &written,
                 &args->output_stride)) {
    return false;
  }
  args->output = const_cast<void*>(written);
  return delta == Py_None || read_rows(delta, reader, args->num_tokens, args->hidden_size,
                                       &args->delta, &args->delta_stride);
}

template <typename Args>
bool read_weights(PyObject* const* three, TensorReader* reader, Args* args) {
  const int64_t hidden_size = args->hidden_size;
  return reader->read_weight(three[0], hidden_size, &args->norm_weight) &&
         reader->read_weight(three[1], hidden_size, &args->qk_weight) &&
         (three[2] == Py_None ||
          reader->read_weight(three[2], hidden_size, &args->output_norm_weight));
}

template <typename Args>
bool read_blocks(PyObject* object, TensorReader* reader, Args* args) {
  dlpack::Tensor blocks;
  if (!reader->read(object, 3, &blocks) || blocks.shape[2] != args->hidden_size) return false;
  args->num_bank_tokens = blocks.shape[0];
  args->num_bank_rows = blocks.shape[1];
  args->blocks = blocks.data;
  args->blocks_row_stride = meaningful_stride(blocks, 1, args->hidden_size);
  args->blocks_token_stride =
      meaningful_stride(blocks, 0, blocks.shape[1] * args->blocks_row_stride);
  return true;
}

// Fills `args` from (prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks,
// block_write_idx, eps, output_norm_eps, out, pdl, backend, batch_invariant); false when the call is for the slow path.
inline bool read_call(PyObject* const* objects, TensorReader* reader, attnres_forward_args* args) {
  return read_prefix(objects[0], objects[1], objects[10], reader, args) &&
         read_blocks(objects[2], reader, args) && read_weights(objects + 3, reader, args) &&
         read_int(objects[6], &args->num_blocks) && read_int(objects[7], &args->block_write_idx) &&
         read_float(objects[8], &args->eps) && read_float(objects[9], &args->output_norm_eps) &&
         read_pdl(objects[11], &args->pdl) &&
         read_batch_invariant(objects[13], &args->batch_invariant);
}

// The same from (prefix, delta, bank, lse, norm_weight, qk_weight, output_norm_weight, blocks,
// block_write_idx, eps, output_norm_eps, out, pdl, backend, batch_invariant).
inline bool read_call(PyObject* const* objects, TensorReader* reader, attnres_merge_args* args) {
  dlpack::Tensor bank, lse;
  if (!read_prefix(objects[0], objects[1], objects[11], reader, args) ||
      !reader->read_same_or_float32(objects[2], 2, &bank) ||
      !reader->read_float32(objects[3], 1, &lse) || bank.shape[1] != args->hidden_size ||
      bank.shape[0] != lse.shape[0]) {
    return false;
  }
  if (objects[7] != Py_None &&
      (!read_blocks(objects[7], reader, args) || args->num_bank_tokens != bank.shape[0])) {
    return false;
  }
  args->num_bank_tokens = bank.shape[0];
  args->bank = bank.data;
  args->bank_stride = meaningful_stride(bank, 0, args->hidden_size);
  args->float32_bank = reader->has_same_dtype(bank) ? 0 : 1;
  args->lse = static_cast<const float*>(lse.data);
  return read_weights(objects + 4, reader, args) && read_int(objects[8], &args->block_write_idx) &&
         read_float(objects[9], &args->eps) && read_float(objects[10], &args->output_norm_eps) &&
         read_pdl(objects[12], &args->pdl) &&
         read_batch_invariant(objects[14], &args->batch_invariant);
}

// f(prefix, ..., out, pdl, backend, batch_invariant) -> True when the call was served, False when it is for the
// slow path. Nothing is written before either False or an exception.
template <typename Args, attnres_status (*Launch)(const Args*, CUstream_st*),
          attnres_status (*RunOnHost)(const Args*), Py_ssize_t kCount>
PyObject* serve_tensors(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  if (count != kCount) {
    PyErr_Format(PyExc_TypeError, "expected %zd positional arguments, got %zd", kCount, count);
    return nullptr;
  }
  if (tensor_types.api == nullptr) Py_RETURN_FALSE;
  Args args = Fields<Args>::kDefaults;
  TensorReader reader;
  const Backend backend = read_backend(objects[kCount - 2]);
  if (backend == Backend::kOther || !read_call(objects, &reader, &args)) Py_RETURN_FALSE;

  attnres_status status = ATTNRES_OK;
  if (reader.device_type() == dlpack::kCuda && backend != Backend::kHost) {
    void* stream = nullptr;
    if (tensor_types.api->current_stream(dlpack::kCuda, reader.device_id(), &stream) != 0) {
      return nullptr;
    }
    args.device = reader.device_id();
    Py_BEGIN_ALLOW_THREADS;
    status = Launch(&args, static_cast<CUstream_st*>(stream));
    Py_END_ALLOW_THREADS;
  } else if (reader.device_type() == dlpack::kCpu && backend != Backend::kNative) {
    Py_BEGIN_ALLOW_THREADS;
    status = RunOnHost(&args);
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
