// SPDX-License-Identifier: Apache-2.0
// How a failure travels inside the library: thrown as Error, caught once in c_api.cpp.
#pragma once

#include <string>
#include <string_view>
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

// Text from outside, a variable or a file, for a message: whatever it holds, a terminal and a decoder of UTF-8
// take it.
inline char printable(char c) { return c >= 0x20 && c < 0x7f ? c : '?'; }
inline std::string printable(std::string_view text) {
  std::string shown(text);
  for (char& c : shown) c = printable(c);
  return shown;
}

}  // namespace attnres
