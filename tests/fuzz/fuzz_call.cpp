// SPDX-License-Identifier: Apache-2.0
// Fuzz target: the input describes one use of the C interface. Structs are of every size, each in memory of
// exactly that size; arrays lie in one block of memory, at places that may overlap, and any field may be
// replaced by any value. A refused call must have changed no byte; an accepted one must be one that the
// header allows, change the bytes that it says and no other, and leave the right numbers in them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../cpp/forward_case.hpp"
#include "attnres/attnres.h"
#include "fuzz_input.hpp"

using forward_case::decode;
using forward_case::encode;
using forward_case::Format;
using forward_case::format_of;
using forward_case::round_to;
using fuzz::Input;

namespace {

__extension__ typedef __int128 Wide;
using Bytes = std::vector<unsigned char>;

// The largest struct that the library takes; a size beyond is a mistake of the caller.
constexpr size_t kMaxStructSize = 4096;

attnres_forward_args default_args() {
  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  return args;
}

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

StructSize draw_struct_size(Input& input, size_t known) {
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

void require_message(attnres_status status) {
  if (status == ATTNRES_OK) return;
  const std::string message = attnres_last_error_message();
  REQUIRE_SAYING(fuzz::is_printable(message), message);
}

// The functions that fill a caller's struct.
void use_result_struct(Input& input) {
  const int which = static_cast<int>(input.range(0, 3));
  const size_t sizes[] = {sizeof(attnres_probe_info), sizeof(attnres_permutation),
                          sizeof(attnres_plan_info), sizeof(attnres_plan_info)};
  const StructSize size = draw_struct_size(input, sizes[which]);
  const Bytes filler(kMaxStructSize, 0x5a);
  CallerStruct result(filler.data(), filler.size(), size.real, size.claimed);
  const Bytes before = result.bytes();
  const int32_t number =
      input.flag() ? static_cast<int32_t>(input.range(-1, 1)) : static_cast<int32_t>(input.word());
  attnres_status status = ATTNRES_OK;
  if (which == 0) {
    status = attnres_probe(number, result.as<attnres_probe_info>());
  } else if (which == 1) {
    status = attnres_get_permutation(number, result.as<attnres_permutation>());
    REQUIRE(status != ATTNRES_OK || (number >= 0 && number < attnres_num_permutations()));
  } else {
    // Aligned addresses of no memory: neither function looks at it.
    attnres_forward_args args = default_args();
    args.num_tokens = input.range(0, 64);
    args.num_bank_tokens = input.flag() ? args.num_tokens : input.range(0, 4);
    args.num_bank_rows = 8;
    args.hidden_size = input.flag() ? 7168 : input.range(1, 64) * 8;
    args.num_blocks = static_cast<int32_t>(input.range(-1, 9));
    args.prefix = reinterpret_cast<void*>(uintptr_t{1} << 40);
    args.blocks = reinterpret_cast<void*>(uintptr_t{2} << 40);
    args.output = reinterpret_cast<void*>(uintptr_t{3} << 40);
    args.norm_weight = args.qk_weight = reinterpret_cast<void*>(uintptr_t{4} << 40);
    args.prefix_stride = args.output_stride = args.blocks_row_stride = args.hidden_size;
    args.blocks_token_stride = 8 * args.hidden_size;
    args.pdl = static_cast<int32_t>(input.range(-1, 3));
    args.device = which == 2 ? -1 : 0;
    args.kernel = static_cast<int32_t>(input.range(0, 3));
    args.rows_per_stage = static_cast<int32_t>(input.range(0, 4));
    args.ctas_per_sm = static_cast<int32_t>(input.range(0, 3));
    args.rows_in_flight = static_cast<int32_t>(input.range(0, 17));
    args.cluster_size = static_cast<int32_t>(input.range(0, 17));
    args.batch_invariant = static_cast<int32_t>(input.range(-2, 2));
    attnres_plan_info* plan = result.as<attnres_plan_info>();
    status = which == 2 ? attnres_plan(&args, plan)
                        : attnres_plan_for(&args, static_cast<int32_t>(input.range(8, 12)),
                                           static_cast<int32_t>(input.range(0, 3)), number, plan);
  }
  require_message(status);
  const Bytes after = result.bytes();
  if (status != ATTNRES_OK) {
    REQUIRE(after == before);
    return;
  }
  REQUIRE(size.claimed <= kMaxStructSize && size.claimed % 4 == 0);
  size_t claimed = 0;
  std::memcpy(&claimed, after.data(), sizeof(claimed));
  REQUIRE(claimed == size.claimed);
  for (size_t i = sizes[which]; i < after.size(); ++i) REQUIRE(after[i] == 0);
}

// An array argument as the header describes it: rows of hidden_size elements at two strides.
struct Array {
  const void* pointer;
  int64_t count[2];
  int64_t stride[2];
  bool written;

  bool is_there() const { return pointer != nullptr && count[0] > 0 && count[1] > 0; }
};

enum ArrayIndex { kOutput, kPrefix, kBlocks, kDelta, kNormWeight, kQkWeight, kOutputNormWeight };

std::vector<Array> arrays_of(const attnres_forward_args& a) {
  const int64_t m = a.num_tokens;
  return {{a.output, {m, 1}, {a.output_stride, 0}, true},
          {a.prefix, {m, 1}, {a.prefix_stride, 0}, a.delta != nullptr},
          {a.blocks,
           {a.num_bank_tokens, a.num_bank_rows},
           {a.blocks_token_stride, a.blocks_row_stride},
           a.block_write_idx >= 0},
          {a.delta, {m, 1}, {a.delta_stride, 0}, false},
          {a.norm_weight, {1, 1}, {0, 0}, false},
          {a.qk_weight, {1, 1}, {0, 0}, false},
          {a.output_norm_weight, {1, 1}, {0, 0}, false}};
}

struct Call {
  attnres_forward_args args;  // as the library understands the caller's struct
  Bytes memory;
  bool moderate = false;  // every number that is read is of a size that float32 takes in its stride

  int element_size() const { return format_of(args.dtype).size; }
  int64_t offset_of(const void* pointer) const {
    return reinterpret_cast<intptr_t>(pointer) - reinterpret_cast<intptr_t>(memory.data());
  }
  int64_t row_offset(const Array& array, int64_t i, int64_t j) const {
    return offset_of(array.pointer) + (i * array.stride[0] + j * array.stride[1]) * element_size();
  }
  int64_t row_bytes() const { return args.hidden_size * element_size(); }
};

// Whether every byte of every array lies in the call's memory. In arithmetic that cannot overflow.
bool lies_in_memory(const Call& call) {
  if (call.args.hidden_size < 1) return false;
  for (const Array& array : arrays_of(call.args)) {
    if (!array.is_there()) continue;
    Wide reach = call.args.hidden_size;
    for (int d = 0; d < 2; ++d) {
      if (array.stride[d] < 0) return false;
      reach += Wide{array.count[d] - 1} * array.stride[d];
    }
    const Wide begin = Wide{reinterpret_cast<intptr_t>(array.pointer)} -
                       reinterpret_cast<intptr_t>(call.memory.data());
    if (begin < 0 || begin + reach * call.element_size() > Wide(call.memory.size())) return false;
  }
  return true;
}

template <typename Body>
void for_each_row(const Call& call, const Array& array, Body&& body) {
  if (!array.is_there()) return;
  for (int64_t i = 0; i < array.count[0]; ++i) {
    for (int64_t j = 0; j < array.count[1]; ++j) body(call.row_offset(array, i, j));
  }
}

constexpr int64_t kMaxPaintedBytes = 1 << 17;

bool can_be_painted(const Call& call) {
  Wide bytes = 0;
  for (const Array& array : arrays_of(call.args)) {
    if (array.is_there()) bytes += Wide{array.count[0]} * array.count[1] * call.row_bytes();
  }
  return bytes <= kMaxPaintedBytes;
}

// Whether a written array shares a byte with another or with itself, found by writing down every byte's owner.
bool shares_a_written_byte(const Call& call) {
  const std::vector<Array> arrays = arrays_of(call.args);
  Bytes owners(call.memory.size(), 0xff);
  for (const bool written : {true, false}) {
    for (size_t index = 0; index < arrays.size(); ++index) {
      if (arrays[index].written != written) continue;
      bool shared = false;
      for_each_row(call, arrays[index], [&](int64_t row) {
        for (int64_t i = row; i < row + call.row_bytes(); ++i) {
          shared |= owners[i] != 0xff;
          if (written) owners[i] = static_cast<unsigned char>(index);
        }
      });
      if (shared) return true;
    }
  }
  return false;
}

// What the header and docs/operator.md say of a valid call, one line each.
void require_documented(const attnres_forward_args& a) {
  REQUIRE(a.num_tokens >= 0 && a.num_bank_tokens >= 0 && a.num_bank_rows >= 0);
  REQUIRE(a.hidden_size >= 1);
  REQUIRE(a.num_tokens == a.num_bank_tokens ||
          (a.num_bank_tokens > 0 && a.num_tokens % a.num_bank_tokens == 0));
  REQUIRE(a.num_blocks >= 0 && a.num_blocks <= 8 && a.num_blocks <= a.num_bank_rows);
  REQUIRE(a.block_write_idx >= -1 && a.block_write_idx < a.num_bank_rows);
  REQUIRE(a.block_write_idx < 0 || a.num_tokens <= a.num_bank_tokens);
  REQUIRE(std::isfinite(a.eps) && a.eps >= 0 && std::isfinite(a.output_norm_eps));
  REQUIRE(a.output_norm_eps >= 0 && a.dtype >= 0 && a.dtype <= 2 && a.num_threads >= 0);
  REQUIRE(a.batch_invariant >= -1 && a.batch_invariant <= 1);
  if (a.num_tokens == 0) return;
  const std::vector<Array> arrays = arrays_of(a);
  for (const int index : {kOutput, kPrefix, kNormWeight, kQkWeight}) {
    REQUIRE(arrays[index].pointer != nullptr);
  }
  REQUIRE(a.blocks != nullptr || a.num_bank_rows == 0);
  for (const Array& array : arrays) {
    if (!array.is_there()) continue;
    REQUIRE(reinterpret_cast<uintptr_t>(array.pointer) % format_of(a.dtype).size == 0);
    for (int d = 0; d < 2; ++d) REQUIRE(array.stride[d] >= 0 || array.count[d] == 1);
  }
}

// Numbers of each kind into every element of `memory`.
void fill_wild(Call& call, std::mt19937& random) {
  const double special[] = {0.0,      -0.0,    INFINITY, -INFINITY, NAN,     1.0,
                            0x1p-149, 0x1p127, -3e38,    0x1p-130,  65504.0, 0x1p-24};
  const int size = call.element_size();
  const unsigned rarity = 1 + random() % 16;
  for (size_t i = 0; i + size <= call.memory.size(); i += size) {
    const uint32_t draw = static_cast<uint32_t>(random());
    if (draw % rarity == 0) {
      encode(call.args.dtype, special[draw / rarity % std::size(special)], &call.memory[i]);
    } else {
      std::memcpy(&call.memory[i], &draw, size);
    }
  }
}

// Numbers near one where the call reads, NaN everywhere else, bank rows that it must not read included.
void fill_moderate(Call& call, std::mt19937& random) {
  std::fill(call.memory.begin(), call.memory.end(), 0xff);
  std::vector<Array> read = arrays_of(call.args);
  read[kBlocks].count[1] = call.args.num_blocks;
  read.erase(read.begin() + kOutput);
  for (const Array& array : read) {
    for_each_row(call, array, [&](int64_t row) {
      for (int64_t i = 0; i < call.args.hidden_size; ++i) {
        const double magnitude = std::ldexp(1.0 + random() % 1024 / 1024.0, -4 + random() % 6);
        encode(call.args.dtype, random() % 2 == 0 ? magnitude : -magnitude,
               &call.memory[row + i * call.element_size()]);
      }
    });
  }
}

// What one token's output must be: a float64 result, and how far float32 arithmetic may be from it.
struct ExpectedRow {
  std::vector<double> value;
  std::vector<double> tolerance;
};

ExpectedRow expected_row(const attnres_forward_args& a, const std::vector<std::vector<double>>& v,
                         const std::vector<double>& query, const std::vector<double>& weight) {
  const int n = static_cast<int>(v.size());
  const int64_t h = a.hidden_size;
  std::vector<double> share(n, 1.0);
  double share_error = 0;  // relative
  if (n > 1) {
    double maximum = -INFINITY, sum = 0;
    for (int i = 0; i < n; ++i) {
      double dot = 0, absolute = 0, squares = 0;
      for (int64_t k = 0; k < h; ++k) {
        dot += v[i][k] * query[k];
        absolute += std::fabs(v[i][k] * query[k]);
        squares += v[i][k] * v[i][k];
      }
      const double norm = std::sqrt(squares / h + a.eps);
      share[i] = dot / norm;
      share_error = std::max(share_error, 0x1p-18 * (absolute / norm + 1));
      maximum = std::max(maximum, share[i]);
    }
    for (double& s : share) sum += s = std::exp(s - maximum);
    for (double& s : share) s /= sum;
  }
  ExpectedRow row{std::vector<double>(h), std::vector<double>(h)};
  double squares = 0, error_squares = 0;
  for (int64_t k = 0; k < h; ++k) {
    double absolute = 0;
    for (int i = 0; i < n; ++i) {
      row.value[k] += share[i] * v[i][k];
      absolute += share[i] * std::fabs(v[i][k]);
    }
    row.tolerance[k] = (n > 1 ? 2 * share_error + 0x1p-18 : 0.0) * absolute;
    squares += row.value[k] * row.value[k];
    error_squares += row.tolerance[k] * row.tolerance[k];
  }
  if (a.output_norm_weight == nullptr) return row;
  const double denominator = squares / h + a.output_norm_eps;
  const double scale = 1.0 / std::sqrt(denominator);
  // The error of the sum of squares, relative to the denominator: small unless the sources cancel.
  const double scale_error =
      (2 * std::sqrt(squares * error_squares) + error_squares) / h / denominator + 0x1p-18;
  for (int64_t k = 0; k < h; ++k) {
    row.tolerance[k] =
        scale * std::fabs(weight[k]) * (row.tolerance[k] + scale_error * std::fabs(row.value[k]));
    row.value[k] *= scale * weight[k];
  }
  return row;
}

// Judges a call's memory, as it is after the call, by the bytes before it.
class Judge {
 public:
  Judge(const Call& call, const Bytes& before)
      : call_(call),
        before_(before),
        after_(call.memory),
        a_(call.args),
        arrays_(arrays_of(call.args)) {}

  void require_right() {
    Bytes expected = before_;
    std::vector<bool> is_output(expected.size());
    for (int64_t m = 0; m < a_.num_tokens; ++m) {
      const int64_t prefix_row = call_.row_offset(arrays_[kPrefix], m, 0);
      for (int64_t k = 0; k < a_.hidden_size; ++k) update(expected, m, k);
      if (a_.block_write_idx >= 0) {
        const int64_t row = call_.row_offset(arrays_[kBlocks], entry_of(m), a_.block_write_idx);
        std::memcpy(&expected[row], &expected[prefix_row], call_.row_bytes());
      }
      const int64_t output_row = call_.row_offset(arrays_[kOutput], m, 0);
      std::fill_n(is_output.begin() + output_row, call_.row_bytes(), true);
      require_output(expected, m);
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      REQUIRE_SAYING(is_output[i] || after_[i] == expected[i], "byte " + std::to_string(i));
    }
  }

 private:
  int64_t entry_of(int64_t m) const { return m / (a_.num_tokens / a_.num_bank_tokens); }
  double element(const Bytes& memory, int64_t row, int64_t k) const {
    return decode(a_.dtype, &memory[row + k * call_.element_size()]);
  }

  // prefix[m, k] after the call.
  void update(Bytes& expected, int64_t m, int64_t k) {
    if (a_.delta == nullptr) return;
    const int64_t row = call_.row_offset(arrays_[kPrefix], m, 0);
    const int64_t delta_row = call_.row_offset(arrays_[kDelta], m, 0);
    const int64_t at = row + k * call_.element_size();
    // Rounded to float32 first, as the contract says; that the sum is a double never changes the result.
    const float sum = static_cast<float>(element(before_, row, k) + element(before_, delta_row, k));
    const double p = round_to(format_of(a_.dtype), sum);
    if (std::isnan(p)) {
      REQUIRE(std::isnan(element(after_, row, k)));
      std::memcpy(&expected[at], &after_[at], call_.element_size());
    } else {
      encode(a_.dtype, p, &expected[at]);
    }
  }

  void require_output(const Bytes& expected, int64_t m) {
    const int64_t h = a_.hidden_size;
    const int64_t output_row = call_.row_offset(arrays_[kOutput], m, 0);
    const int64_t prefix_row = call_.row_offset(arrays_[kPrefix], m, 0);
    if (a_.num_blocks == 0 && a_.output_norm_weight == nullptr) {
      // One source has weight 1: its elements come out as they are.
      for (int64_t k = 0; k < h; ++k) {
        const double want = element(expected, prefix_row, k), got = element(after_, output_row, k);
        REQUIRE(std::isnan(want) ? std::isnan(got)
                                 : got == want && std::signbit(got) == std::signbit(want));
      }
      return;
    }
    if (!call_.moderate || h > kMaxJudgedSize) return;
    std::vector<std::vector<double>> sources(a_.num_blocks + 1, std::vector<double>(h));
    std::vector<double> query(h), weight(h);
    for (int64_t k = 0; k < h; ++k) {
      for (int32_t i = 0; i < a_.num_blocks; ++i) {
        const int64_t row = call_.row_offset(arrays_[kBlocks], entry_of(m), i);
        sources[i][k] = element(before_, row, k);
      }
      sources[a_.num_blocks][k] = element(expected, prefix_row, k);
      query[k] = static_cast<float>(element(before_, call_.offset_of(a_.norm_weight), k) *
                                    element(before_, call_.offset_of(a_.qk_weight), k));
      if (a_.output_norm_weight != nullptr) {
        weight[k] = element(before_, call_.offset_of(a_.output_norm_weight), k);
      }
    }
    const ExpectedRow row = expected_row(a_, sources, query, weight);
    const Format& format = format_of(a_.dtype);
    const double smallest = std::ldexp(1.0, format.min_exponent - format.precision);
    for (int64_t k = 0; k < h; ++k) {
      const double want = row.value[k];
      const double tolerance =
          row.tolerance[k] + format.element_tolerance * std::fabs(want) + 2 * smallest;
      // Beyond float16, or sources that cancel so well that float32 cannot tell: nothing to judge by.
      if (!(std::fabs(want) < 6e4) || !(tolerance < 1 + 0.25 * std::fabs(want))) continue;
      const double got = element(after_, output_row, k);
      REQUIRE_SAYING(std::fabs(got - want) <= tolerance,
                     "token " + std::to_string(m) + ", element " + std::to_string(k) + ": " +
                         std::to_string(got) + " and " + std::to_string(want));
    }
  }

  static constexpr int64_t kMaxJudgedSize = 256;  // the tolerance is for sums of so many

  const Call& call_;
  const Bytes& before_;
  const Bytes& after_;
  const attnres_forward_args& a_;
  const std::vector<Array> arrays_;
};

// Row `row` of an array that may be absent; its stride then may be anything.
template <typename Pointer>
Pointer row_of(Pointer pointer, int64_t row, int64_t stride, int element_size) {
  if (pointer == nullptr) return nullptr;
  return static_cast<unsigned char*>(const_cast<void*>(pointer)) + row * stride * element_size;
}

// Token by token, in one thread, the call gives the same bits, whatever the numbers are.
void require_independent_tokens(Call& call, const Bytes& before) {
  const Bytes after = call.memory;
  std::copy(before.begin(), before.end(), call.memory.begin());
  const attnres_forward_args& a = call.args;
  const int size = call.element_size();
  for (int64_t m = 0; m < a.num_tokens; ++m) {
    const int64_t entry = m / (a.num_tokens / a.num_bank_tokens);
    attnres_forward_args one = a;
    one.num_tokens = one.num_bank_tokens = one.num_threads = 1;
    one.prefix = row_of(a.prefix, m, a.prefix_stride, size);
    one.delta = row_of(a.delta, m, a.delta_stride, size);
    if (a.num_bank_rows > 0) one.blocks = row_of(a.blocks, entry, a.blocks_token_stride, size);
    one.output = row_of(a.output, m, a.output_stride, size);
    const attnres_status status = attnres_forward_host(&one);
    REQUIRE_SAYING(status == ATTNRES_OK, std::string(attnres_last_error_message()));
  }
  REQUIRE(call.memory == after);
}

// Valid arguments in memory of their own, for the changes below to start from.
Call draw_call(Input& input) {
  Call call{default_args(), {}};
  attnres_forward_args& a = call.args;
  a.dtype = static_cast<int32_t>(input.range(0, 2));
  a.num_bank_tokens = input.range(1, 4);
  const int64_t prefixes = std::max<int64_t>(1, input.range(-5, 3));
  a.num_tokens = a.num_bank_tokens * prefixes;
  a.num_bank_rows = input.range(0, 9);
  a.hidden_size = input.range(1, 140);
  a.num_blocks = static_cast<int32_t>(input.range(0, std::min<int64_t>(8, a.num_bank_rows)));
  if (prefixes == 1) a.block_write_idx = static_cast<int32_t>(input.range(-1, a.num_bank_rows - 1));
  a.prefix_stride = a.hidden_size + input.range(0, 9);
  a.delta_stride = a.hidden_size + input.range(0, 9);
  a.output_stride = a.hidden_size + input.range(0, 9);
  a.blocks_row_stride = a.hidden_size + input.range(0, 9);
  a.blocks_token_stride = a.blocks_row_stride * a.num_bank_rows + input.range(0, 9);
  if (input.flag()) {  // rows outside, entries inside
    a.blocks_token_stride = a.blocks_row_stride;
    a.blocks_row_stride *= a.num_bank_tokens;
  }
  a.num_threads = static_cast<int32_t>(input.range(0, 3));
  a.batch_invariant = static_cast<int32_t>(input.range(-1, 1));
  const int optional = input.byte();
  const int size = call.element_size();
  const int64_t elements[] = {a.num_tokens * a.output_stride,
                              a.num_tokens * a.prefix_stride,
                              a.num_bank_tokens * std::max<int64_t>(1, a.num_bank_rows) *
                                  std::max(a.blocks_row_stride, a.blocks_token_stride),
                              a.num_tokens * a.delta_stride,
                              a.hidden_size,
                              a.hidden_size,
                              a.hidden_size};
  int64_t offsets[std::size(elements)];
  int64_t end = size * input.range(0, 8);
  for (size_t i = 0; i < std::size(elements); ++i) {
    offsets[i] = end;
    end += size * (elements[i] + input.range(0, 8));
  }
  call.memory.resize(end);
  unsigned char* const memory = call.memory.data();
  a.output = memory + offsets[kOutput];
  a.prefix = memory + offsets[kPrefix];
  if (a.num_bank_rows > 0 || (optional & 4) != 0) a.blocks = memory + offsets[kBlocks];
  if ((optional & 1) != 0) a.delta = memory + offsets[kDelta];
  a.norm_weight = memory + offsets[kNormWeight];
  a.qk_weight = memory + offsets[kQkWeight];
  if ((optional & 2) != 0) a.output_norm_weight = memory + offsets[kOutputNormWeight];
  return call;
}

struct Field {
  size_t offset;
  size_t size;
  bool pointer;
};
#define FIELD(name, is_pointer) \
  Field { offsetof(attnres_forward_args, name), sizeof(attnres_forward_args::name), is_pointer }
constexpr Field kFields[] = {FIELD(num_tokens, false),
                             FIELD(num_bank_tokens, false),
                             FIELD(num_bank_rows, false),
                             FIELD(hidden_size, false),
                             FIELD(num_blocks, false),
                             FIELD(block_write_idx, false),
                             FIELD(prefix, true),
                             FIELD(delta, true),
                             FIELD(blocks, true),
                             FIELD(norm_weight, true),
                             FIELD(qk_weight, true),
                             FIELD(output_norm_weight, true),
                             FIELD(output, true),
                             FIELD(prefix_stride, false),
                             FIELD(delta_stride, false),
                             FIELD(blocks_token_stride, false),
                             FIELD(blocks_row_stride, false),
                             FIELD(output_stride, false),
                             FIELD(eps, false),
                             FIELD(output_norm_eps, false),
                             FIELD(dtype, false),
                             FIELD(pdl, false),
                             FIELD(device, false),
                             FIELD(kernel, false),
                             FIELD(rows_per_stage, false),
                             FIELD(ctas_per_sm, false),
                             FIELD(cluster_size, false),
                             FIELD(num_threads, false),
                             FIELD(batch_invariant, false),
                             FIELD(rows_in_flight, false)};
#undef FIELD

// A few fields get another value: any, one near the present one, or for pointers a place near another's.
void change_fields(Input& input, attnres_forward_args& args) {
  unsigned char* const bytes = reinterpret_cast<unsigned char*>(&args);
  const int64_t changes = std::max<int64_t>(0, input.range(-3, 4));
  for (int64_t i = 0; i < changes; ++i) {
    const Field& field = kFields[input.range(0, std::size(kFields) - 1)];
    uint64_t value = 0;
    std::memcpy(&value, bytes + field.offset, field.size);
    const uint8_t kind = input.byte() % 4;
    if (kind == 0) {
      value = input.word();
    } else if (kind == 1) {
      value = static_cast<uint64_t>(input.range(-1, 1)) << input.range(0, 63);
    } else {
      if (field.pointer && kind == 2) {
        const Field& other = kFields[6 + input.range(0, 6)];
        std::memcpy(&value, bytes + other.offset, other.size);
      }
      value += static_cast<uint64_t>(input.range(-600, 600));
    }
    std::memcpy(bytes + field.offset, &value, field.size);
  }
}

// The variables that are asked at every call; the others are kept from their first use on.
void set_environment(Input& input) {
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

void use_call(Input& input) {
  Call call = draw_call(input);
  change_fields(input, call.args);
  const StructSize size = draw_struct_size(input, sizeof(attnres_forward_args));
  set_environment(input);
  CallerStruct caller(&call.args, sizeof(call.args), size.real, size.claimed);
  if (size.claimed > sizeof(call.args) && input.flag()) {
    Bytes beyond = caller.bytes();
    if (beyond.size() > sizeof(call.args)) {
      beyond[input.range(sizeof(call.args), beyond.size() - 1)] = input.byte();
    }
    caller = CallerStruct(beyond.data(), beyond.size(), size.real, size.claimed);
  }
  const Bytes caller_before = caller.bytes();
  const attnres_forward_args* args = caller.as<attnres_forward_args>();
  call.args = default_args();
  std::memcpy(&call.args, args, std::min(size.real, sizeof(call.args)));
  call.args.struct_size = sizeof(call.args);
  call.moderate = input.flag();
  std::mt19937 random(static_cast<unsigned>(input.range(0, 65535)));
  const bool has_dtype = call.args.dtype >= ATTNRES_BFLOAT16 && call.args.dtype <= ATTNRES_FLOAT32;
  if (has_dtype) fill_wild(call, random);

  const attnres_status verdict = attnres_check(args, 0);
  require_message(verdict);
  const std::string message = verdict == ATTNRES_OK ? "" : attnres_last_error_message();
  const bool in_memory = has_dtype && lies_in_memory(call);
  const bool painted = in_memory && can_be_painted(call);
  if (verdict == ATTNRES_OK) {
    REQUIRE(size.claimed <= kMaxStructSize && size.claimed % 4 == 0);
    REQUIRE(size.claimed >= offsetof(attnres_forward_args, eps));
    require_documented(call.args);
    if (call.args.num_tokens > 0 && painted) REQUIRE(!shares_a_written_byte(call));
  } else {
    REQUIRE(verdict == ATTNRES_INVALID_ARGUMENT);
    const bool overlap = message.find(" no byte ") != std::string::npos;
    if (overlap && painted) REQUIRE_SAYING(shares_a_written_byte(call), message);
  }

  Bytes before = call.memory;
  // A device's verdict is at least as strict; without a library for one, calls end there.
  const attnres_status on_device = attnres_check(args, 1);
  require_message(on_device);
  if (on_device != ATTNRES_OK || attnres_num_permutations() == 0) {
    const attnres_status status = attnres_forward(args, nullptr);
    REQUIRE(status == on_device || (on_device == ATTNRES_OK && status == ATTNRES_UNSUPPORTED));
    REQUIRE(attnres_floor(args, nullptr) == status);
  }
  // An accepted call whose arrays lie elsewhere must not be made.
  if (verdict != ATTNRES_OK || (in_memory && painted) || call.args.num_tokens == 0) {
    if (verdict == ATTNRES_OK && call.args.num_tokens > 0) {
      if (call.moderate) fill_moderate(call, random);
      before = call.memory;
    }
    const attnres_status status = attnres_forward_host(args);
    require_message(status);
    // The number of threads is not judged before it is needed.
    const bool judges_threads =
        std::string_view(attnres_last_error_message()).starts_with("LIBATTNRES_NUM_THREADS: ");
    REQUIRE(status == verdict || (status == ATTNRES_INVALID_ARGUMENT && judges_threads));
    if (status != ATTNRES_OK || call.args.num_tokens == 0) {
      REQUIRE(call.memory == before);
    } else {
      Judge(call, before).require_right();
      require_independent_tokens(call, before);
    }
  }
  REQUIRE(caller.bytes() == caller_before);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  if (input.byte() % 4 == 3) {
    use_result_struct(input);
  } else {
    use_call(input);
  }
  return 0;
}
