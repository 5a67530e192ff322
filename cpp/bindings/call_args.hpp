// SPDX-License-Identifier: Apache-2.0
// Positional Python arguments of one call -> the struct of the C ABI. METH_FASTCALL rather than a pybind11
// signature: 30 converters and their overload machinery cost more than the call itself.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "attnres/attnres.h"

namespace attnres::bindings {

enum class FieldKind { kPointer, kInt64, kInt32, kFloat };

struct Field {
  const char* name;
  FieldKind kind;
  size_t offset;
};

// The fields of each struct in the order of the Python arguments.
template <typename Args>
struct Fields;

#define ATTNRES_FIELD(name, kind) \
  Field { #name, FieldKind::kind, offsetof(ATTNRES_STRUCT, name) }
#define ATTNRES_STRUCT attnres_forward_args
template <>
struct Fields<attnres_forward_args> {
  static constexpr attnres_forward_args kDefaults = ATTNRES_FORWARD_ARGS_INIT;
  static constexpr Field kList[] = {
      ATTNRES_FIELD(prefix, kPointer),
      ATTNRES_FIELD(delta, kPointer),
      ATTNRES_FIELD(blocks, kPointer),
      ATTNRES_FIELD(norm_weight, kPointer),
      ATTNRES_FIELD(qk_weight, kPointer),
      ATTNRES_FIELD(output_norm_weight, kPointer),
      ATTNRES_FIELD(output, kPointer),
      ATTNRES_FIELD(num_tokens, kInt64),
      ATTNRES_FIELD(num_bank_tokens, kInt64),
      ATTNRES_FIELD(num_bank_rows, kInt64),
      ATTNRES_FIELD(hidden_size, kInt64),
      ATTNRES_FIELD(num_blocks, kInt32),
      ATTNRES_FIELD(block_write_idx, kInt32),
      ATTNRES_FIELD(prefix_stride, kInt64),
      ATTNRES_FIELD(delta_stride, kInt64),
      ATTNRES_FIELD(blocks_token_stride, kInt64),
      ATTNRES_FIELD(blocks_row_stride, kInt64),
      ATTNRES_FIELD(output_stride, kInt64),
      ATTNRES_FIELD(eps, kFloat),
      ATTNRES_FIELD(output_norm_eps, kFloat),
      ATTNRES_FIELD(dtype, kInt32),
      ATTNRES_FIELD(pdl, kInt32),
      ATTNRES_FIELD(device, kInt32),
      ATTNRES_FIELD(kernel, kInt32),
      ATTNRES_FIELD(rows_per_stage, kInt32),
      ATTNRES_FIELD(ctas_per_sm, kInt32),
      ATTNRES_FIELD(cluster_size, kInt32),
      ATTNRES_FIELD(rows_in_flight, kInt32),
      ATTNRES_FIELD(num_threads, kInt32),
      ATTNRES_FIELD(batch_invariant, kInt32),
  };
};
#undef ATTNRES_STRUCT

#define ATTNRES_STRUCT attnres_bank_args
template <>
struct Fields<attnres_bank_args> {
  static constexpr attnres_bank_args kDefaults = ATTNRES_BANK_ARGS_INIT;
  static constexpr Field kList[] = {
      ATTNRES_FIELD(blocks, kPointer),
      ATTNRES_FIELD(norm_weights, kPointer),
      ATTNRES_FIELD(qk_weights, kPointer),
      ATTNRES_FIELD(bank, kPointer),
      ATTNRES_FIELD(lse, kPointer),
      ATTNRES_FIELD(num_bank_tokens, kInt64),
      ATTNRES_FIELD(num_bank_rows, kInt64),
      ATTNRES_FIELD(hidden_size, kInt64),
      ATTNRES_FIELD(num_blocks, kInt32),
      ATTNRES_FIELD(num_sites, kInt32),
      ATTNRES_FIELD(blocks_token_stride, kInt64),
      ATTNRES_FIELD(blocks_row_stride, kInt64),
      ATTNRES_FIELD(norm_weights_stride, kInt64),
      ATTNRES_FIELD(qk_weights_stride, kInt64),
      ATTNRES_FIELD(bank_site_stride, kInt64),
      ATTNRES_FIELD(bank_token_stride, kInt64),
      ATTNRES_FIELD(lse_stride, kInt64),
      ATTNRES_FIELD(eps, kFloat),
      ATTNRES_FIELD(dtype, kInt32),
      ATTNRES_FIELD(float32_bank, kInt32),
      ATTNRES_FIELD(pdl, kInt32),
      ATTNRES_FIELD(device, kInt32),
      ATTNRES_FIELD(num_clusters, kInt32),
      ATTNRES_FIELD(num_threads, kInt32),
      ATTNRES_FIELD(batch_invariant, kInt32),
  };
};
#undef ATTNRES_STRUCT

#define ATTNRES_STRUCT attnres_merge_args
template <>
struct Fields<attnres_merge_args> {
  static constexpr attnres_merge_args kDefaults = ATTNRES_MERGE_ARGS_INIT;
  static constexpr Field kList[] = {
      ATTNRES_FIELD(prefix, kPointer),
      ATTNRES_FIELD(delta, kPointer),
      ATTNRES_FIELD(bank, kPointer),
      ATTNRES_FIELD(lse, kPointer),
      ATTNRES_FIELD(norm_weight, kPointer),
      ATTNRES_FIELD(qk_weight, kPointer),
      ATTNRES_FIELD(output_norm_weight, kPointer),
      ATTNRES_FIELD(blocks, kPointer),
      ATTNRES_FIELD(output, kPointer),
      ATTNRES_FIELD(num_tokens, kInt64),
      ATTNRES_FIELD(num_bank_tokens, kInt64),
      ATTNRES_FIELD(num_bank_rows, kInt64),
      ATTNRES_FIELD(hidden_size, kInt64),
      ATTNRES_FIELD(block_write_idx, kInt32),
      ATTNRES_FIELD(prefix_stride, kInt64),
      ATTNRES_FIELD(delta_stride, kInt64),
      ATTNRES_FIELD(bank_stride, kInt64),
      ATTNRES_FIELD(blocks_token_stride, kInt64),
      ATTNRES_FIELD(blocks_row_stride, kInt64),
      ATTNRES_FIELD(output_stride, kInt64),
      ATTNRES_FIELD(eps, kFloat),
      ATTNRES_FIELD(output_norm_eps, kFloat),
      ATTNRES_FIELD(dtype, kInt32),
      ATTNRES_FIELD(float32_bank, kInt32),
      ATTNRES_FIELD(pdl, kInt32),
      ATTNRES_FIELD(device, kInt32),
      ATTNRES_FIELD(kernel, kInt32),
      ATTNRES_FIELD(rows_per_stage, kInt32),
      ATTNRES_FIELD(ctas_per_sm, kInt32),
      ATTNRES_FIELD(cluster_size, kInt32),
      ATTNRES_FIELD(rows_in_flight, kInt32),
      ATTNRES_FIELD(num_threads, kInt32),
      ATTNRES_FIELD(batch_invariant, kInt32),
  };
};
#undef ATTNRES_STRUCT

#undef ATTNRES_FIELD

template <typename Args>
constexpr Py_ssize_t kNumFieldsOf = static_cast<Py_ssize_t>(std::size(Fields<Args>::kList));
inline constexpr Py_ssize_t kNumFields = kNumFieldsOf<attnres_forward_args>;

// Python int -> value; false with ValueError or TypeError set, naming `name`.
inline bool to_int64(PyObject* object, const char* name, int64_t* value) {
  int overflow = 0;
  *value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) {
    PyErr_Format(PyExc_ValueError, "%s: expected a 64-bit integer, got %R", name, object);
    return false;
  }
  return *value != -1 || PyErr_Occurred() == nullptr;
}

inline bool to_int32(PyObject* object, const char* name, int32_t* value) {
  int64_t wide = 0;
  if (!to_int64(object, name, &wide)) return false;
  *value = static_cast<int32_t>(wide);
  if (*value != wide) {
    PyErr_Format(PyExc_ValueError, "%s: expected a 32-bit integer, got %R", name, object);
    return false;
  }
  return true;
}

inline bool to_float(PyObject* object, float* value) {
  const double wide = PyFloat_AsDouble(object);
  *value = static_cast<float>(wide);
  return wide != -1.0 || PyErr_Occurred() == nullptr;
}

inline bool parse_field(const Field& field, PyObject* object, char* base) {
  char* target = base + field.offset;
  switch (field.kind) {
    case FieldKind::kPointer: {
      void* address = PyLong_AsVoidPtr(object);
      *reinterpret_cast<void**>(target) = address;
      return address != nullptr || PyErr_Occurred() == nullptr;
    }
    case FieldKind::kInt64:
      return to_int64(object, field.name, reinterpret_cast<int64_t*>(target));
    case FieldKind::kInt32:
      return to_int32(object, field.name, reinterpret_cast<int32_t*>(target));
    case FieldKind::kFloat:
      return to_float(object, reinterpret_cast<float*>(target));
  }
  return false;
}

// The first kNumFieldsOf<Args> of `count` arguments; `extra` more belong to the caller.
template <typename Args>
bool parse_call(PyObject* const* objects, Py_ssize_t count, Py_ssize_t extra, Args* args) {
  if (count != kNumFieldsOf<Args> + extra) {
    PyErr_Format(PyExc_TypeError, "expected %zd positional arguments, got %zd",
                 kNumFieldsOf<Args> + extra, count);
    return false;
  }
  *args = Fields<Args>::kDefaults;
  for (Py_ssize_t i = 0; i < kNumFieldsOf<Args>; ++i) {
    if (!parse_field(Fields<Args>::kList[i], objects[i], reinterpret_cast<char*>(args))) {
      return false;
    }
  }
  return true;
}

}  // namespace attnres::bindings
