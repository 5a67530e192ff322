// SPDX-License-Identifier: Apache-2.0
// The one place where a status of the C ABI becomes a Python exception.
#pragma once

#include <Python.h>

#include "attnres/attnres.h"

namespace attnres::bindings {

// libattnres.UnsupportedError, a RuntimeError; created when the module is.
inline PyObject* unsupported_error = nullptr;

// Sets the exception of a failed call of this thread. The GIL is held.
inline void set_exception(attnres_status status) {
  PyObject* type = PyExc_RuntimeError;
  if (status == ATTNRES_INVALID_ARGUMENT) type = PyExc_ValueError;
  if (status == ATTNRES_UNSUPPORTED) type = unsupported_error;
  PyErr_SetString(type, attnres_last_error_message());
}

}  // namespace attnres::bindings
