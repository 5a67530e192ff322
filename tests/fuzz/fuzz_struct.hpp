// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets of calls share: callers' structs of any size, arguments changed at random, and arrays in
// one block of memory whose bytes are looked at one by one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../cpp/forward_case.hpp"
#include "attnres/attnres.h"
#include "fuzz_input.hpp"

namespace fuzz {

__extension__ typedef __int128 Wide;
using Bytes = std::vector<unsigned char>;

// The largest struct that the library takes; a size beyond is a mistake of the caller.
constexpr size_t kMaxStructSize = 4096;

// A caller's struct of `size` bytes, in an allocation of its own that holds no more.
class CallerStruct {
 public:
  CallerStruct(const void* from, size_t from_size, size_t size, size_t claimed)
      : size_(size), bytes_(std::make_unique<unsigned char[]>(size)) {
    std::memcpy(bytes_.get(), from, std::min(from_size, size));
    std::memcpy(bytes_.get(), &claimed, sizeof(claimed));
  }
  template <typename Struct>
  Struct* as() {
    return reinterpret_cast<Struct*>(bytes_.get());
  }
  Bytes bytes() const { return Bytes(bytes_.get(), bytes_.get() + size_); }

 private:
  size_t size_;
  std::unique_ptr<unsigned char[]> bytes_;
};

// A size for a struct that has `known` bytes today, and how much memory to give it.
struct StructSize {
  size_t claimed;
  size_t real;
};

inline StructSize draw_struct_size(Input& input, size_t known) {
  size_t claimed = known;
  switch (input.byte() % 8) {
    case 0:
      claimed = static_cast<size_t>(input.range(0, 4200));
      break;
    case 1:
      claimed = static_cast<size_t>(input.word());
      break;
    case 2:
      claimed = known + 4 * static_cast<size_t>(input.range(0, 15));
      break;
    case 3:
      claimed = known - 4 * static_cast<size_t>(input.range(0, 9));
      break;
    default:
      break;
  }
  return {claimed, std::clamp(claimed, sizeof(size_t), kMaxStructSize)};
}

inline void require_message(attnres_status status) {
  if (status == ATTNRES_OK) return;
  const std::string message = attnres_last_error_message();
  REQUIRE_SAYING(is_printable(message), message);
}

// An array argument as the header describes it: rows of so many elements at two strides.
struct Array {
  const void* pointer;
  int64_t count[2];
  int64_t stride[2];
  bool written;
  int64_t row_size;
  int element_size;

  bool is_there() const { return pointer != nullptr && count[0] > 0 && count[1] > 0; }
  int64_t row_bytes() const { return row_size * element_size; }
};

inline int64_t offset_of(const Bytes& memory, const void* pointer) {
  return reinterpret_cast<intptr_t>(pointer) - reinterpret_cast<intptr_t>(memory.data());
}

inline int64_t row_offset(const Bytes& memory, const Array& array, int64_t i, int64_t j) {
  return offset_of(memory, array.pointer) +
         (i * array.stride[0] + j * array.stride[1]) * array.element_size;
}

// Whether every byte of every array lies in the memory. No sum or product here passes 127 bits.
inline bool lies_in_memory(const Bytes& memory, const std::vector<Array>& arrays) {
  const Wide size{static_cast<int64_t>(memory.size())};
  for (const Array& array : arrays) {
    if (array.row_size < 1) return false;
    if (!array.is_there()) continue;
    Wide reach = array.row_size;
    for (int d = 0; d < 2; ++d) {
      if (array.stride[d] < 0) return false;
      reach += Wide{array.count[d] - 1} * array.stride[d];
      if (reach > size) return false;
    }
    const Wide begin =
        Wide{reinterpret_cast<intptr_t>(array.pointer)} - reinterpret_cast<intptr_t>(memory.data());
    if (begin < 0 || begin + reach * array.element_size > size) return false;
  }
  return true;
}

template <typename Body>
void for_each_row(const Bytes& memory, const Array& array, Body&& body) {
  if (!array.is_there()) return;
  for (int64_t i = 0; i < array.count[0]; ++i) {
    for (int64_t j = 0; j < array.count[1]; ++j) body(row_offset(memory, array, i, j));
  }
}

constexpr int64_t kMaxPaintedBytes = 1 << 17;

inline bool can_be_painted(const std::vector<Array>& arrays) {
  Wide bytes = 0;
  for (const Array& array : arrays) {
    if (!array.is_there()) continue;
    const Wide rows = Wide{array.count[0]} * array.count[1];
    if (rows > kMaxPaintedBytes) return false;
    bytes += rows * array.row_bytes();
  }
  return bytes <= kMaxPaintedBytes;
}

// Whether a written array shares a byte with another or with itself, found by writing down every byte's owner.
inline bool shares_a_written_byte(const Bytes& memory, const std::vector<Array>& arrays) {
  Bytes owners(memory.size(), 0xff);
  for (const bool written : {true, false}) {
    for (size_t index = 0; index < arrays.size(); ++index) {
      if (arrays[index].written != written) continue;
      bool shared = false;
      for_each_row(memory, arrays[index], [&](int64_t row) {
        for (int64_t i = row; i < row + arrays[index].row_bytes(); ++i) {
          shared |= owners[i] != 0xff;
          if (written) owners[i] = static_cast<unsigned char>(index);
        }
      });
      if (shared) return true;
    }
  }
  return false;
}

// Numbers of each kind into every element.
inline void fill_wild(Bytes& memory, int32_t dtype, std::mt19937& random) {
  const double special[] = {0.0,      -0.0,    INFINITY, -INFINITY, NAN,     1.0,
                            0x1p-149, 0x1p127, -3e38,    0x1p-130,  65504.0, 0x1p-24};
  const int size = forward_case::format_of(dtype).size;
  const unsigned rarity = 1 + random() % 16;
  for (size_t i = 0; i + size <= memory.size(); i += size) {
    const uint32_t draw = static_cast<uint32_t>(random());
    if (draw % rarity == 0) {
      forward_case::encode(dtype, special[draw / rarity % std::size(special)], &memory[i]);
    } else {
      std::memcpy(&memory[i], &draw, size);
    }
  }
}

// A number near one.
inline double moderate_number(std::mt19937& random) {
  const double magnitude = std::ldexp(1.0 + random() % 1024 / 1024.0, -4 + random() % 6);
  return random() % 2 == 0 ? magnitude : -magnitude;
}

// What a row of results must be: float64 numbers, and how far float32 arithmetic may be from them.
struct ExpectedRow {
  std::vector<double> value;
  std::vector<double> tolerance;
};

struct Score {
  double value;
  double error;
};

inline Score score_of(const std::vector<double>& v, const std::vector<double>& query, float eps) {
  double dot = 0, absolute = 0, squares = 0;
  for (size_t k = 0; k < v.size(); ++k) {
    dot += v[k] * query[k];
    absolute += std::fabs(v[k] * query[k]);
    squares += v[k] * v[k];
  }
  const double norm = std::sqrt(squares / v.size() + eps);
  return {dot / norm, 0x1p-18 * (absolute / norm + 1)};
}

inline double log_sum_exp(const std::vector<Score>& scores) {
  double maximum = -INFINITY, sum = 0;
  for (const Score& score : scores) maximum = std::max(maximum, score.value);
  for (const Score& score : scores) sum += std::exp(score.value - maximum);
  return maximum + std::log(sum);
}

// The mean of rows, weighted by the softmax of their scores. One row has weight 1.
inline ExpectedRow mixed_row(const std::vector<std::vector<double>>& v,
                             const std::vector<Score>& scores) {
  const size_t h = v[0].size();
  const double lse = log_sum_exp(scores);
  double error = 0;  // relative, of a weight
  for (const Score& score : scores) error = std::max(error, score.error);
  ExpectedRow row{std::vector<double>(h), std::vector<double>(h)};
  for (size_t k = 0; k < h; ++k) {
    double absolute = 0;
    for (size_t i = 0; i < v.size(); ++i) {
      const double weight = v.size() == 1 ? 1.0 : std::exp(scores[i].value - lse);
      row.value[k] += weight * v[i][k];
      absolute += weight * std::fabs(v[i][k]);
    }
    row.tolerance[k] = (v.size() > 1 ? 2 * error + 0x1p-18 : 0.0) * absolute;
  }
  return row;
}

inline void apply_norm(ExpectedRow& row, const std::vector<double>& weight, float eps) {
  const size_t h = row.value.size();
  double squares = 0, error_squares = 0;
  for (size_t k = 0; k < h; ++k) {
    squares += row.value[k] * row.value[k];
    error_squares += row.tolerance[k] * row.tolerance[k];
  }
  const double denominator = squares / h + eps;
  const double scale = 1.0 / std::sqrt(denominator);
  // The error of the sum of squares, relative to the denominator: small unless the sources cancel.
  const double scale_error =
      (2 * std::sqrt(squares * error_squares) + error_squares) / h / denominator + 0x1p-18;
  for (size_t k = 0; k < h; ++k) {
    row.tolerance[k] =
        scale * std::fabs(weight[k]) * (row.tolerance[k] + scale_error * std::fabs(row.value[k]));
    row.value[k] *= scale * weight[k];
  }
}

inline void require_near(const ExpectedRow& row, int64_t k, double got, int32_t dtype,
                         const char* name) {
  const forward_case::Format& format = forward_case::format_of(dtype);
  const double smallest = std::ldexp(1.0, format.min_exponent - format.precision);
  const double want = row.value[k];
  const double tolerance =
      row.tolerance[k] + format.element_tolerance * std::fabs(want) + 2 * smallest;
  // Beyond float16, or sources that cancel so well that float32 cannot tell: nothing to judge by.
  if (!(std::fabs(want) < 6e4) || !(tolerance < 1 + 0.25 * std::fabs(want))) return;
  REQUIRE_SAYING(std::fabs(got - want) <= tolerance,
                 std::string(name) + ", element " + std::to_string(k) + ": " + std::to_string(got) +
                     " and " + std::to_string(want));
}

constexpr int64_t kMaxJudgedSize = 256;  // the tolerances are for sums of so many

// Row `row` of an array that may be absent; its stride then may be anything.
template <typename Pointer>
Pointer row_of(Pointer pointer, int64_t row, int64_t stride, int element_size) {
  if (pointer == nullptr) return nullptr;
  return static_cast<unsigned char*>(const_cast<void*>(pointer)) + row * stride * element_size;
}

struct Field {
  size_t offset;
  size_t size;
  bool pointer;
};
// A few fields get another value: any, one near the present one, or for pointers a place near another's.
template <typename Args, size_t N>
void change_fields(Input& input, Args& args, const Field (&fields)[N]) {
  std::vector<Field> pointers;
  std::copy_if(std::begin(fields), std::end(fields), std::back_inserter(pointers),
               [](const Field& field) { return field.pointer; });
  unsigned char* const bytes = reinterpret_cast<unsigned char*>(&args);
  const int64_t changes = std::max<int64_t>(0, input.range(-3, 4));
  for (int64_t i = 0; i < changes; ++i) {
    const Field& field = fields[input.range(0, N - 1)];
    uint64_t value = 0;
    std::memcpy(&value, bytes + field.offset, field.size);
    const uint8_t kind = input.byte() % 4;
    if (kind == 0) {
      value = input.word();
    } else if (kind == 1) {
      value = static_cast<uint64_t>(input.range(-1, 1)) << input.range(0, 63);
    } else {
      if (field.pointer && kind == 2) {
        const Field& other = pointers[input.range(0, pointers.size() - 1)];
        std::memcpy(&value, bytes + other.offset, other.size);
      }
      value += static_cast<uint64_t>(input.range(-600, 600));
    }
    std::memcpy(bytes + field.offset, &value, field.size);
  }
}

// The variables that are asked at every call; the others are kept from their first use on.
inline void set_environment(Input& input) {
  for (const char* name : {"LIBATTNRES_NUM_THREADS", "LIBATTNRES_BATCH_INVARIANT"}) {
    const int size = std::max(0, static_cast<int>(input.range(-12, 3)));
    std::string value;
    for (int i = 0; i < size; ++i) value += static_cast<char>(input.byte());
    if (size == 0) {
      unsetenv(name);
    } else {
      setenv(name, value.c_str(), 1);
    }
  }
}

// The arguments as a caller of any version would hand them over, and as the library is to understand them.
template <typename Args>
CallerStruct draw_caller(Input& input, Args& args, const Args& defaults, StructSize& size) {
  size = draw_struct_size(input, sizeof(Args));
  set_environment(input);
  CallerStruct caller(&args, sizeof(args), size.real, size.claimed);
  if (size.claimed > sizeof(args) && input.flag()) {
    Bytes beyond = caller.bytes();
    if (beyond.size() > sizeof(args)) {
      beyond[input.range(sizeof(args), beyond.size() - 1)] = input.byte();
    }
    caller = CallerStruct(beyond.data(), beyond.size(), size.real, size.claimed);
  }
  args = defaults;
  std::memcpy(&args, caller.as<Args>(), std::min(size.real, sizeof(args)));
  args.struct_size = sizeof(args);
  return caller;
}

}  // namespace fuzz
