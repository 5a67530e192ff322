// SPDX-License-Identifier: Apache-2.0
// How a failure travels inside the library: thrown as Error, caught once in c_api.cpp.
#pragma once

#include <string>
#include <utility>

#include "attnres/attnres.h"

namespace attnres {

struct Error {
  attnres_status status;
  std::string message;
};

[[noreturn]] inline void fail(attnres_status status, std::string message) {
  throw Error{status, std::move(message)};
}

}  // namespace attnres
