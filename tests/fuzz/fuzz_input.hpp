// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets share: an input taken apart from the front, and a check that ends the process, which
// is how both libFuzzer and the replay tell a finding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

namespace fuzz {

[[noreturn]] inline void report(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::abort();
}

// Bytes from the front; zeros once they have run out, so that every input is a whole one.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  uint64_t word() {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= uint64_t{byte()} << (8 * i);
    return word;
  }
  // From two bytes at most: low <= result <= high.
  int64_t range(int64_t low, int64_t high) {
    const uint64_t values = static_cast<uint64_t>(high - low) + 1;
    uint64_t draw = byte();
    if (values > 256) draw = draw << 8 | byte();
    return low + static_cast<int64_t>(draw % values);
  }
  bool flag() { return (byte() & 1) != 0; }
  std::string_view rest() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const uint8_t* data_;
  size_t size_;
};

// The rule for every message of the library.
inline bool is_printable(std::string_view message) {
  for (const char c : message) {
    if (c < 0x20 || c > 0x7e) return false;
  }
  return !message.empty();
}

}  // namespace fuzz

// Always on, whatever NDEBUG says.
#define REQUIRE(condition) \
  ((condition) ? void() : fuzz::report(__FILE__, __LINE__, "expected " #condition))
#define REQUIRE_SAYING(condition, what) \
  ((condition) ? void() : fuzz::report(__FILE__, __LINE__, "expected " #condition ": " + (what)))

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
