// SPDX-License-Identifier: Apache-2.0
// One call of the operator with its memory, and the float64 answer it is judged by. Every element
// that the call must not read is NaN, so is the output before the call, and bytes that it must not
// write are compared afterwards.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "attnres/attnres.h"

namespace forward_case {

// A floating-point format by its numbers, so that rounding here shares nothing with the library's.
struct Format {
  int size;          // bytes
  int precision;     // significand bits, the implicit one included
  int min_exponent;  // of the smallest normal number
  int max_exponent;
  double element_tolerance;  // relative
  double row_tolerance;      // times the row's root mean square
};

inline const Format& format_of(int32_t dtype) {
  static const Format formats[] = {
      {2, 8, -126, 127, 0x1p-8, 2e-3},    // the contract's tolerance
      {2, 11, -14, 15, 0x1p-11, 2e-4},    // float16
      {4, 24, -126, 127, 0x1p-23, 2e-5},  // float32: scores near 40 amplify their rounding in exp
  };
  return formats[dtype];
}

inline double round_to(const Format& format, double x) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), format.min_exponent);
  const double unit = std::ldexp(1.0, exponent - format.precision + 1);
  const double rounded = std::nearbyint(x / unit) * unit;
  const double largest =
      std::ldexp(2.0 - std::ldexp(1.0, 1 - format.precision), format.max_exponent);
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, x) : rounded;
}

inline double decode(int32_t dtype, const unsigned char* from) {
  if (dtype == ATTNRES_FLOAT32) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  const int mantissa_bits = format_of(dtype).precision - 1;
  const int exponent_mask = (1 << (15 - mantissa_bits)) - 1;
  const int exponent = (bits >> mantissa_bits) & exponent_mask;
  const double mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int min_exponent = format_of(dtype).min_exponent;
  if (exponent == exponent_mask) return mantissa != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, min_exponent - mantissa_bits);
  return sign *
         std::ldexp(mantissa + (1 << mantissa_bits), min_exponent + exponent - 1 - mantissa_bits);
}

inline void encode(int32_t dtype, double x, unsigned char* to) {
  const Format& format = format_of(dtype);
  x = round_to(format, x);
  if (dtype == ATTNRES_FLOAT32) {
    const float value = static_cast<float>(x);
    std::memcpy(to, &value, 4);
    return;
  }
  const int mantissa_bits = format.precision - 1;
  const uint32_t top = ((1u << (15 - mantissa_bits)) - 1) << mantissa_bits;
  uint32_t bits;
  if (std::isnan(x)) {
    bits = 0x7fff;
  } else if (std::isinf(x)) {
    bits = top;
  } else if (std::fabs(x) < std::ldexp(1.0, format.min_exponent)) {
    bits = static_cast<uint32_t>(std::ldexp(std::fabs(x), mantissa_bits - format.min_exponent));
  } else {
    const int exponent = std::ilogb(x);
    bits = static_cast<uint32_t>(std::ldexp(std::fabs(x), mantissa_bits - exponent)) +
           (static_cast<uint32_t>(exponent - format.min_exponent) << mantissa_bits);
  }
  const uint16_t word = static_cast<uint16_t>(bits | (std::signbit(x) ? 0x8000u : 0u));
  std::memcpy(to, &word, 2);
}

// Elements in memory, at the alignment that malloc gives (16 bytes).
struct Buffer {
  int32_t dtype = 0;
  std::vector<unsigned char> bytes;

  void resize(int32_t element_dtype, int64_t count) {
    dtype = element_dtype;
    bytes.resize(static_cast<size_t>(count * format_of(dtype).size));
    for (int64_t i = 0; i < count; ++i) set(i, NAN);
  }
  double get(int64_t i) const { return decode(dtype, &bytes[i * format_of(dtype).size]); }
  void set(int64_t i, double x) { encode(dtype, x, &bytes[i * format_of(dtype).size]); }
  void* data() { return bytes.empty() ? nullptr : bytes.data(); }
};

struct Shape {
  int64_t num_tokens = 3;
  int64_t prefixes_per_entry = 1;  // B
  int64_t num_bank_rows = 8;
  int64_t hidden_size = 64;
  int32_t num_blocks = 4;
  int32_t block_write_idx = -1;
  bool has_delta = true;
  bool has_output_norm = true;
  int32_t dtype = ATTNRES_BFLOAT16;
  int64_t padding = 0;  // elements after each row
  float eps = 1e-5f;
  float output_norm_eps = 1e-3f;
  unsigned seed = 1;
};

inline std::string name_of(const Shape& s) {
  std::string name = "M=" + std::to_string(s.num_tokens);
  name += " B=" + std::to_string(s.prefixes_per_entry) + " H=" + std::to_string(s.hidden_size);
  name += " num_blocks=" + std::to_string(s.num_blocks);
  name += " write=" + std::to_string(s.block_write_idx) + (s.has_delta ? " delta" : "");
  name += std::string(s.has_output_norm ? " norm" : "") + " dtype=" + std::to_string(s.dtype);
  return name + " padding=" + std::to_string(s.padding);
}

enum Index { kPrefix, kDelta, kBlocks, kNormWeight, kQkWeight, kOutputNormWeight, kOutput, kCount };

class ForwardCase {
 public:
  explicit ForwardCase(const Shape& shape) : shape(shape) {
    const int64_t h = shape.hidden_size, stride = row_stride();
    const int64_t entries = num_entries();
    buffers[kPrefix].resize(shape.dtype, shape.num_tokens * stride);
    buffers[kDelta].resize(shape.dtype, shape.has_delta ? shape.num_tokens * stride : 0);
    buffers[kBlocks].resize(shape.dtype, entries * shape.num_bank_rows * stride);
    buffers[kNormWeight].resize(shape.dtype, h);
    buffers[kQkWeight].resize(shape.dtype, h);
    buffers[kOutputNormWeight].resize(shape.dtype, shape.has_output_norm ? h : 0);
    buffers[kOutput].resize(shape.dtype, shape.num_tokens * stride);
    std::mt19937 random(shape.seed);
    std::normal_distribution<double> normal;
    const auto fill = [&](int index, int64_t begin) {
      for (int64_t i = 0; i < h; ++i) buffers[index].set(begin + i, normal(random));
    };
    for (int64_t m = 0; m < shape.num_tokens; ++m) {
      fill(kPrefix, m * stride);
      if (shape.has_delta) fill(kDelta, m * stride);
    }
    for (int64_t t = 0; t < entries; ++t) {
      for (int32_t i = 0; i < shape.num_blocks; ++i)
        fill(kBlocks, (t * shape.num_bank_rows + i) * stride);
    }
    fill(kNormWeight, 0);
    fill(kQkWeight, 0);
    if (shape.has_output_norm) fill(kOutputNormWeight, 0);
  }

  int64_t row_stride() const { return shape.hidden_size + shape.padding; }
  int64_t num_entries() const { return shape.num_tokens / shape.prefixes_per_entry; }

  attnres_forward_args args() {
    void* pointers[kCount];
    for (int i = 0; i < kCount; ++i) pointers[i] = buffers[i].data();
    return args(pointers);
  }

  // The call on a copy of the buffers, such as one in device memory.
  attnres_forward_args args(void* const* pointers) const {
    attnres_forward_args a = ATTNRES_FORWARD_ARGS_INIT;
    a.num_tokens = shape.num_tokens;
    a.num_bank_tokens = num_entries();
    a.num_bank_rows = shape.num_bank_rows;
    a.hidden_size = shape.hidden_size;
    a.num_blocks = shape.num_blocks;
    a.block_write_idx = shape.block_write_idx;
    a.prefix = pointers[kPrefix];
    a.delta = shape.has_delta ? pointers[kDelta] : nullptr;
    a.blocks = pointers[kBlocks];
    a.norm_weight = pointers[kNormWeight];
    a.qk_weight = pointers[kQkWeight];
    a.output_norm_weight = shape.has_output_norm ? pointers[kOutputNormWeight] : nullptr;
    a.output = pointers[kOutput];
    a.prefix_stride = a.delta_stride = a.blocks_row_stride = a.output_stride = row_stride();
    a.blocks_token_stride = shape.num_bank_rows * row_stride();
    a.eps = shape.eps;
    a.output_norm_eps = shape.output_norm_eps;
    a.dtype = shape.dtype;
    return a;
  }

  // What the call must leave in every buffer. For the output, the exact bytes of the padding; its
  // rows are judged by `output`.
  struct Expected {
    std::vector<unsigned char> bytes[kCount];
    std::vector<double> output;  // [M, H]
  };

  // To be called before the operator runs.
  Expected expected() const {
    const int64_t h = shape.hidden_size, stride = row_stride();
    const Format& format = format_of(shape.dtype);
    ForwardCase after = *this;
    Expected result;
    result.output.resize(shape.num_tokens * h);
    const int n = shape.num_blocks + 1;
    for (int64_t m = 0; m < shape.num_tokens; ++m) {
      const int64_t entry = m / shape.prefixes_per_entry * shape.num_bank_rows;
      std::vector<std::vector<double>> v(n, std::vector<double>(h));
      for (int64_t i = 0; i < h; ++i) {
        for (int row = 0; row < n - 1; ++row)
          v[row][i] = buffers[kBlocks].get((entry + row) * stride + i);
        double p = buffers[kPrefix].get(m * stride + i);
        // In float32 first, as the contract says; that never changes the rounded result.
        if (shape.has_delta) {
          p = round_to(format, static_cast<float>(p + buffers[kDelta].get(m * stride + i)));
          after.buffers[kPrefix].set(m * stride + i, p);
        }
        v[n - 1][i] = p;
      }
      std::vector<double> weight(n, 1.0);
      if (n > 1) {
        double sum = 0, maximum = -INFINITY;
        for (int row = 0; row < n; ++row) {
          double dot = 0, squares = 0;
          for (int64_t i = 0; i < h; ++i) {
            const double q =
                static_cast<float>(buffers[kNormWeight].get(i) * buffers[kQkWeight].get(i));
            dot += v[row][i] * q;
            squares += v[row][i] * v[row][i];
          }
          weight[row] = dot / std::sqrt(squares / h + shape.eps);
          maximum = std::max(maximum, weight[row]);
        }
        for (double& w : weight) sum += w = std::exp(w - maximum);
        for (double& w : weight) w /= sum;
      }
      double squares = 0;
      for (int64_t i = 0; i < h; ++i) {
        double& mixed = result.output[m * h + i];
        for (int row = 0; row < n; ++row) mixed += weight[row] * v[row][i];
        squares += mixed * mixed;
      }
      if (shape.has_output_norm) {
        const double scale = 1.0 / std::sqrt(squares / h + shape.output_norm_eps);
        for (int64_t i = 0; i < h; ++i) {
          result.output[m * h + i] *= scale * buffers[kOutputNormWeight].get(i);
        }
      }
      if (shape.block_write_idx >= 0) {
        std::memcpy(
            &after.buffers[kBlocks].bytes[(entry + shape.block_write_idx) * stride * format.size],
            &after.buffers[kPrefix].bytes[m * stride * format.size], h * format.size);
      }
    }
    for (int i = 0; i < kCount; ++i) result.bytes[i] = after.buffers[i].bytes;
    return result;
  }

  // Empty, or what is wrong after the call.
  std::string mismatch(const Expected& expected) const {
    static const char* const names[kCount] = {
        "prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight", "output"};
    for (int i = 0; i < kOutput; ++i) {
      if (buffers[i].bytes != expected.bytes[i]) return std::string(names[i]) + " has wrong bytes";
    }
    const Format& format = format_of(shape.dtype);
    const int64_t h = shape.hidden_size, stride = row_stride();
    for (int64_t m = 0; m < shape.num_tokens; ++m) {
      double squares = 0;
      for (int64_t i = 0; i < h; ++i) squares += std::pow(expected.output[m * h + i], 2);
      const double rms = std::sqrt(squares / h);
      for (int64_t i = 0; i < h; ++i) {
        const double want = expected.output[m * h + i], got = buffers[kOutput].get(m * stride + i);
        // Written so that a NaN fails.
        if (!(std::fabs(got - want) <=
              format.element_tolerance * std::fabs(want) + format.row_tolerance * rms)) {
          return "output[" + std::to_string(m) + ", " + std::to_string(i) + "]: expected " +
                 std::to_string(want) + ", got " + std::to_string(got);
        }
      }
      const size_t tail = (m * stride + h) * format.size;
      if (std::memcmp(buffers[kOutput].bytes.data() + tail, expected.bytes[kOutput].data() + tail,
                      shape.padding * format.size) != 0) {
        return "output's padding was written";
      }
    }
    return "";
  }

  Shape shape;
  Buffer buffers[kCount];
};

}  // namespace forward_case
