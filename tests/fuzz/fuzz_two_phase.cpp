// SPDX-License-Identifier: Apache-2.0
// Fuzz target: the input describes one call of either phase, as fuzz_call.cpp's describes one of the operator. A
// refused call must have changed no byte; an accepted one must be one that the header allows, change the bytes
// that it says and no other, leave the right numbers in them, and the same bits token by token.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "fuzz_struct.hpp"

using forward_case::decode;
using forward_case::encode;
using forward_case::format_of;
using forward_case::round_to;
using fuzz::Array;
using fuzz::Bytes;
using fuzz::CallerStruct;
using fuzz::Field;
using fuzz::Input;
using fuzz::row_of;

namespace {

bool is_dtype(int32_t dtype) { return dtype >= ATTNRES_BFLOAT16 && dtype <= ATTNRES_FLOAT32; }
int size_of(int32_t dtype) { return is_dtype(dtype) ? format_of(dtype).size : 1; }

template <typename Args>
struct Call {
  Args args;  // as the library understands the caller's struct
  Bytes memory;

  int element_size() const { return size_of(args.dtype); }
  int32_t bank_dtype() const { return args.float32_bank != 0 ? ATTNRES_FLOAT32 : args.dtype; }
};

// Elements of a call's memory before and after it.
struct Judge {
  const Bytes& memory;  // where the pointers point
  const Bytes& before;
  const Bytes& after;
  int32_t dtype;
  int32_t bank_dtype;
  bool moderate;  // every number that is read is of a size that float32 takes in its stride

  double element(const Bytes& bytes, const void* row, int64_t k, int32_t type) const {
    return decode(type, &bytes[fuzz::offset_of(memory, row) + k * size_of(type)]);
  }
  std::vector<double> row_before(const void* row, int64_t count, int32_t type) const {
    std::vector<double> result(count);
    for (int64_t k = 0; k < count; ++k) result[k] = element(before, row, k, type);
    return result;
  }
  std::vector<double> query(const void* norm_weight, const void* qk_weight, int64_t count) const {
    std::vector<double> result(count);
    for (int64_t k = 0; k < count; ++k) {
      result[k] = static_cast<float>(element(before, norm_weight, k, dtype) *
                                     element(before, qk_weight, k, dtype));
    }
    return result;
  }
};

// Numbers that arrays of two types wrote over one another are none to judge by.
bool are_moderate(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](double value) { return std::fabs(value) < 1e3; });
}

struct Place {
  void* pointer;  // to the field
  int64_t bytes;
};

// Arrays one after the other, with a few elements of nobody's in between; float32 ones come first.
template <typename Args>
void place_arrays(Input& input, Call<Args>& call, const std::vector<Place>& places) {
  std::vector<int64_t> offsets;
  int64_t end = 4 * input.range(0, 8);
  for (const Place& place : places) {
    end = (end + 3) / 4 * 4;
    offsets.push_back(end);
    end += place.bytes + call.element_size() * input.range(0, 8);
  }
  call.memory.resize(end);
  for (size_t i = 0; i < places.size(); ++i) {
    const void* address = call.memory.data() + offsets[i];
    std::memcpy(places[i].pointer, &address, sizeof(address));
  }
}

template <typename Args>
struct Phase;

#define FIELD(name, is_pointer) \
  Field { offsetof(ARGS, name), sizeof(ARGS::name), is_pointer }

#define ARGS attnres_bank_args
template <>
struct Phase<attnres_bank_args> {
  static attnres_bank_args defaults() { return ATTNRES_BANK_ARGS_INIT; }
  static attnres_status check(const ARGS* args, int32_t on_device) {
    return attnres_check_bank(args, on_device);
  }
  static attnres_status on_device(const ARGS* args) { return attnres_bank(args, nullptr); }
  static attnres_status on_host(const ARGS* args) { return attnres_bank_host(args); }
  static int64_t num_tokens(const ARGS& a) { return a.num_bank_tokens; }

  enum { kBank, kLse, kBlocks, kNormWeights, kQkWeights };
  static std::vector<Array> arrays(const Call<ARGS>& call) {
    const ARGS& a = call.args;
    const int64_t t = a.num_bank_tokens, h = a.hidden_size;
    const int64_t sites = a.num_sites;
    const int size = call.element_size(), bank_size = size_of(call.bank_dtype());
    return {{a.bank, {sites, t}, {a.bank_site_stride, a.bank_token_stride}, true, h, bank_size},
            {a.lse, {sites, 1}, {a.lse_stride, 0}, true, t, 4},
            {a.blocks,
             {t, a.num_bank_rows},
             {a.blocks_token_stride, a.blocks_row_stride},
             false,
             h,
             size},
            {a.norm_weights, {sites, 1}, {a.norm_weights_stride, 0}, false, h, size},
            {a.qk_weights, {sites, 1}, {a.qk_weights_stride, 0}, false, h, size}};
  }

  static constexpr Field kFields[] = {
      FIELD(num_bank_tokens, false),
      FIELD(num_bank_rows, false),
      FIELD(hidden_size, false),
      FIELD(num_blocks, false),
      FIELD(num_sites, false),
      FIELD(blocks, true),
      FIELD(norm_weights, true),
      FIELD(qk_weights, true),
      FIELD(bank, true),
      FIELD(lse, true),
      FIELD(blocks_token_stride, false),
      FIELD(blocks_row_stride, false),
      FIELD(norm_weights_stride, false),
      FIELD(qk_weights_stride, false),
      FIELD(bank_site_stride, false),
      FIELD(bank_token_stride, false),
      FIELD(lse_stride, false),
      FIELD(eps, false),
      FIELD(dtype, false),
      FIELD(float32_bank, false),
      FIELD(pdl, false),
      FIELD(device, false),
      FIELD(num_clusters, false),
      FIELD(num_threads, false),
      FIELD(batch_invariant, false),
  };

  static void draw(Input& input, Call<ARGS>& call) {
    ARGS& a = call.args;
    a.num_bank_tokens = input.range(1, 4);
    a.num_bank_rows = input.range(1, 9);
    a.hidden_size = input.range(1, 140);
    a.num_blocks = static_cast<int32_t>(input.range(1, std::min<int64_t>(8, a.num_bank_rows)));
    a.num_sites = static_cast<int32_t>(input.range(1, 5));
    a.blocks_row_stride = a.hidden_size + input.range(0, 9);
    a.blocks_token_stride = a.blocks_row_stride * a.num_bank_rows + input.range(0, 9);
    a.norm_weights_stride = input.flag() ? a.hidden_size + input.range(0, 9) : 0;
    a.qk_weights_stride = a.hidden_size + input.range(0, 9);
    a.bank_token_stride = a.hidden_size + input.range(0, 9);
    a.bank_site_stride = a.bank_token_stride * a.num_bank_tokens + input.range(0, 9);
    if (input.flag()) {  // tokens outside, call sites inside
      a.bank_site_stride = a.bank_token_stride;
      a.bank_token_stride *= a.num_sites;
    }
    a.lse_stride = a.num_bank_tokens + input.range(0, 5);
    const int64_t bank_floats = call.bank_dtype() == ATTNRES_FLOAT32 ? 4 : 2;
    place_arrays(input, call,
                 {{&a.lse, 4 * a.num_sites * a.lse_stride},
                  {&a.bank, bank_floats * (a.num_sites * a.bank_site_stride +
                                           a.num_bank_tokens * a.bank_token_stride)},
                  {&a.blocks, call.element_size() * a.num_bank_tokens * a.blocks_token_stride},
                  {&a.norm_weights, call.element_size() * a.num_sites * (a.hidden_size + 9)},
                  {&a.qk_weights, call.element_size() * a.num_sites * a.qk_weights_stride}});
  }

  static void require_documented(const ARGS& a) {
    REQUIRE(a.num_bank_tokens >= 0 && a.hidden_size >= 1);
    REQUIRE(a.num_blocks >= 1 && a.num_blocks <= 8 && a.num_blocks <= a.num_bank_rows);
    REQUIRE(a.num_sites >= 1 && a.num_sites <= 1024);
  }

  // The part of one call site and token alone.
  static std::vector<ARGS> parts(const ARGS& a, int size, int bank_size) {
    std::vector<ARGS> result;
    for (int32_t site = 0; site < a.num_sites; ++site) {
      for (int64_t t = 0; t < a.num_bank_tokens; ++t) {
        ARGS one = a;
        one.num_bank_tokens = one.num_sites = one.num_threads = 1;
        one.blocks = row_of(a.blocks, t, a.blocks_token_stride, size);
        one.norm_weights = row_of(a.norm_weights, site, a.norm_weights_stride, size);
        one.qk_weights = row_of(a.qk_weights, site, a.qk_weights_stride, size);
        one.bank = row_of(row_of(a.bank, site, a.bank_site_stride, bank_size), t,
                          a.bank_token_stride, bank_size);
        one.lse = a.lse + site * a.lse_stride + t;
        result.push_back(one);
      }
    }
    return result;
  }

  // The numbers that one part of the call has left.
  static void require_right(const Judge& judge, const ARGS& one);
};
#undef ARGS

#define ARGS attnres_merge_args
template <>
struct Phase<attnres_merge_args> {
  static attnres_merge_args defaults() { return ATTNRES_MERGE_ARGS_INIT; }
  static attnres_status check(const ARGS* args, int32_t on_device) {
    return attnres_check_merge(args, on_device);
  }
  static attnres_status on_device(const ARGS* args) { return attnres_merge(args, nullptr); }
  static attnres_status on_host(const ARGS* args) { return attnres_merge_host(args); }
  static int64_t num_tokens(const ARGS& a) { return a.num_tokens; }

  static std::vector<Array> arrays(const Call<ARGS>& call) {
    const ARGS& a = call.args;
    const int64_t m = a.num_tokens, t = a.num_bank_tokens, h = a.hidden_size;
    const int size = call.element_size(), bank_size = size_of(call.bank_dtype());
    std::vector<Array> result = {
        {a.output, {m, 1}, {a.output_stride, 0}, true, h, size},
        {a.prefix, {m, 1}, {a.prefix_stride, 0}, a.delta != nullptr, h, size},
        {a.bank, {t, 1}, {a.bank_stride, 0}, false, h, bank_size},
        {a.lse, {t > 0, 1}, {0, 0}, false, t, 4},
        {a.delta, {m, 1}, {a.delta_stride, 0}, false, h, size},
        {a.norm_weight, {1, 1}, {0, 0}, false, h, size},
        {a.qk_weight, {1, 1}, {0, 0}, false, h, size},
        {a.output_norm_weight, {1, 1}, {0, 0}, false, h, size}};
    if (a.block_write_idx >= 0) {
      result.push_back({a.blocks,
                        {t, a.num_bank_rows},
                        {a.blocks_token_stride, a.blocks_row_stride},
                        true,
                        h,
                        size});
    }
    return result;
  }

  static constexpr Field kFields[] = {
      FIELD(num_tokens, false),
      FIELD(num_bank_tokens, false),
      FIELD(num_bank_rows, false),
      FIELD(hidden_size, false),
      FIELD(block_write_idx, false),
      FIELD(float32_bank, false),
      FIELD(prefix, true),
      FIELD(delta, true),
      FIELD(bank, true),
      FIELD(lse, true),
      FIELD(norm_weight, true),
      FIELD(qk_weight, true),
      FIELD(output_norm_weight, true),
      FIELD(blocks, true),
      FIELD(output, true),
      FIELD(prefix_stride, false),
      FIELD(delta_stride, false),
      FIELD(bank_stride, false),
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
      FIELD(rows_in_flight, false),
      FIELD(num_threads, false),
      FIELD(batch_invariant, false),
  };

  static void draw(Input& input, Call<ARGS>& call) {
    ARGS& a = call.args;
    a.num_bank_tokens = input.range(1, 4);
    const int64_t prefixes = std::max<int64_t>(1, input.range(-5, 3));
    a.num_tokens = a.num_bank_tokens * prefixes;
    a.num_bank_rows = input.range(1, 9);
    a.hidden_size = input.range(1, 140);
    if (prefixes == 1) {
      a.block_write_idx = static_cast<int32_t>(input.range(-1, a.num_bank_rows - 1));
    }
    a.prefix_stride = a.hidden_size + input.range(0, 9);
    a.delta_stride = a.hidden_size + input.range(0, 9);
    a.bank_stride = a.hidden_size + input.range(0, 9);
    a.output_stride = a.hidden_size + input.range(0, 9);
    a.blocks_row_stride = a.hidden_size + input.range(0, 9);
    a.blocks_token_stride = a.blocks_row_stride * a.num_bank_rows + input.range(0, 9);
    const int optional = input.byte();
    const int64_t size = call.element_size();
    place_arrays(input, call,
                 {{&a.lse, 4 * a.num_bank_tokens},
                  {&a.bank, size_of(call.bank_dtype()) * a.num_bank_tokens * a.bank_stride},
                  {&a.output, size * a.num_tokens * a.output_stride},
                  {&a.prefix, size * a.num_tokens * a.prefix_stride},
                  {&a.blocks, size * a.num_bank_tokens * a.blocks_token_stride},
                  {&a.delta, size * a.num_tokens * a.delta_stride},
                  {&a.norm_weight, size * a.hidden_size},
                  {&a.qk_weight, size * a.hidden_size},
                  {&a.output_norm_weight, size * a.hidden_size}});
    if ((optional & 1) != 0) a.delta = nullptr;
    if ((optional & 2) != 0) a.output_norm_weight = nullptr;
    if ((optional & 4) != 0 && a.block_write_idx < 0) a.blocks = nullptr;
  }

  static void require_documented(const ARGS& a) {
    REQUIRE(a.num_tokens >= 0 && a.num_bank_tokens >= 0 && a.hidden_size >= 1);
    REQUIRE(a.num_tokens == a.num_bank_tokens ||
            (a.num_bank_tokens > 0 && a.num_tokens % a.num_bank_tokens == 0));
    REQUIRE(a.block_write_idx >= -1);
    REQUIRE(a.block_write_idx < 0 ||
            (a.block_write_idx < a.num_bank_rows && a.num_tokens <= a.num_bank_tokens));
    REQUIRE(std::isfinite(a.output_norm_eps) && a.output_norm_eps >= 0);
  }

  static std::vector<ARGS> parts(const ARGS& a, int size, int bank_size) {
    std::vector<ARGS> result;
    for (int64_t m = 0; m < a.num_tokens; ++m) {
      const int64_t entry = m / (a.num_tokens / a.num_bank_tokens);
      ARGS one = a;
      one.num_tokens = one.num_bank_tokens = one.num_threads = 1;
      one.prefix = row_of(a.prefix, m, a.prefix_stride, size);
      one.delta = row_of(a.delta, m, a.delta_stride, size);
      one.bank = row_of(a.bank, entry, a.bank_stride, bank_size);
      one.lse = a.lse + entry;
      one.output = row_of(a.output, m, a.output_stride, size);
      if (a.block_write_idx >= 0) {
        one.blocks = row_of(a.blocks, entry, a.blocks_token_stride, size);
      }
      result.push_back(one);
    }
    return result;
  }

  static void require_right(const Judge& judge, const ARGS& one);
};
#undef ARGS
#undef FIELD

void Phase<attnres_bank_args>::require_right(const Judge& judge, const attnres_bank_args& a) {
  const int64_t h = a.hidden_size;
  if (!judge.moderate || h > fuzz::kMaxJudgedSize) return;
  const std::vector<double> query = judge.query(a.norm_weights, a.qk_weights, h);
  bool judged = are_moderate(query);
  std::vector<std::vector<double>> rows;
  std::vector<fuzz::Score> scores;
  for (int32_t i = 0; i < a.num_blocks; ++i) {
    const void* row = row_of(a.blocks, i, a.blocks_row_stride, size_of(a.dtype));
    rows.push_back(judge.row_before(row, h, a.dtype));
    scores.push_back(fuzz::score_of(rows.back(), query, a.eps));
    judged = judged && are_moderate(rows.back());
  }
  if (!judged) return;
  double tolerance = 0x1p-18;
  for (const fuzz::Score& score : scores) tolerance = std::max(tolerance, 2 * score.error);
  const double lse = judge.element(judge.after, a.lse, 0, ATTNRES_FLOAT32);
  const double wanted = fuzz::log_sum_exp(scores);
  REQUIRE_SAYING(std::fabs(lse - wanted) <= tolerance + 0x1p-20 * std::fabs(wanted),
                 "lse: " + std::to_string(lse) + " and " + std::to_string(wanted));
  const fuzz::ExpectedRow row = fuzz::mixed_row(rows, scores);
  for (int64_t k = 0; k < h; ++k) {
    fuzz::require_near(row, k, judge.element(judge.after, a.bank, k, judge.bank_dtype),
                       judge.bank_dtype, "bank");
  }
}

void Phase<attnres_merge_args>::require_right(const Judge& judge, const attnres_merge_args& a) {
  const int64_t h = a.hidden_size;
  const int size = size_of(a.dtype);
  std::vector<double> own = judge.row_before(a.prefix, h, a.dtype);
  for (int64_t k = 0; k < h && a.delta != nullptr; ++k) {
    const float sum = static_cast<float>(own[k] + judge.element(judge.before, a.delta, k, a.dtype));
    own[k] = round_to(format_of(a.dtype), sum);
    const double got = judge.element(judge.after, a.prefix, k, a.dtype);
    REQUIRE(std::isnan(own[k]) ? std::isnan(got)
                               : got == own[k] && std::signbit(got) == std::signbit(own[k]));
  }
  if (a.block_write_idx >= 0) {
    const int64_t row = fuzz::offset_of(
        judge.memory, row_of(a.blocks, a.block_write_idx, a.blocks_row_stride, size));
    const int64_t prefix = fuzz::offset_of(judge.memory, a.prefix);
    REQUIRE(std::memcmp(&judge.after[row], &judge.after[prefix], h * size) == 0);
  }
  const std::vector<double> bank = judge.row_before(a.bank, h, judge.bank_dtype);
  const std::vector<double> query = judge.query(a.norm_weight, a.qk_weight, h);
  const double lse = judge.element(judge.before, a.lse, 0, ATTNRES_FLOAT32);
  if (!judge.moderate || h > fuzz::kMaxJudgedSize) return;
  if (!are_moderate(own) || !are_moderate(bank) || !are_moderate(query) || !are_moderate({lse}))
    return;
  fuzz::ExpectedRow row =
      fuzz::mixed_row({bank, own}, {{lse, 0x1p-18}, fuzz::score_of(own, query, a.eps)});
  if (a.output_norm_weight != nullptr) {
    const std::vector<double> weight = judge.row_before(a.output_norm_weight, h, a.dtype);
    if (!are_moderate(weight)) return;
    fuzz::apply_norm(row, weight, a.output_norm_eps);
  }
  for (int64_t k = 0; k < h; ++k) {
    fuzz::require_near(row, k, judge.element(judge.after, a.output, k, a.dtype), a.dtype, "output");
  }
}

// Numbers near one where the call reads, NaN everywhere else, bank rows that it must not read included.
template <typename Args>
void fill_moderate(Call<Args>& call, const std::vector<Array>& arrays, std::mt19937& random) {
  std::fill(call.memory.begin(), call.memory.end(), 0xff);
  for (Array array : arrays) {
    if constexpr (std::is_same_v<Args, attnres_bank_args>) {
      if (array.pointer == call.args.blocks) array.count[1] = call.args.num_blocks;
    }
    const int32_t dtype = array.element_size == 4 ? ATTNRES_FLOAT32 : call.args.dtype;
    // What is written and not read is the same to the call.
    fuzz::for_each_row(call.memory, array, [&](int64_t row) {
      for (int64_t i = 0; i < array.row_size; ++i) {
        encode(dtype, fuzz::moderate_number(random), &call.memory[row + i * array.element_size]);
      }
    });
  }
}

template <typename Args>
void require_right(Call<Args>& call, const std::vector<Array>& arrays, const Bytes& before,
                   bool moderate) {
  using This = Phase<Args>;
  const Bytes after = call.memory;
  const int size = call.element_size(), bank_size = size_of(call.bank_dtype());
  std::vector<bool> may_change(before.size());
  for (Array array : arrays) {
    if (!array.written) continue;
    if constexpr (std::is_same_v<Args, attnres_merge_args>) {
      if (array.pointer == call.args.blocks && call.args.block_write_idx >= 0) {
        array.pointer = row_of(array.pointer, call.args.block_write_idx, array.stride[1], size);
        array.count[1] = 1;
      }
    }
    fuzz::for_each_row(call.memory, array, [&](int64_t row) {
      std::fill_n(may_change.begin() + row, array.row_bytes(), true);
    });
  }
  for (size_t i = 0; i < before.size(); ++i) {
    REQUIRE_SAYING(may_change[i] || after[i] == before[i], "byte " + std::to_string(i));
  }
  const Judge judge{call.memory, before, after, call.args.dtype, call.bank_dtype(), moderate};
  const std::vector<Args> parts = This::parts(call.args, size, bank_size);
  for (const Args& part : parts) This::require_right(judge, part);
  // Part by part, in one thread, the call gives the same bits, whatever the numbers are.
  std::copy(before.begin(), before.end(), call.memory.begin());
  for (const Args& part : parts) {
    const attnres_status status = This::on_host(&part);
    REQUIRE_SAYING(status == ATTNRES_OK, std::string(attnres_last_error_message()));
  }
  REQUIRE(call.memory == after);
}

template <typename Args>
void require_documented(const Args& a, const std::vector<Array>& arrays) {
  REQUIRE(std::isfinite(a.eps) && a.eps >= 0 && is_dtype(a.dtype));
  REQUIRE(a.float32_bank >= 0 && a.float32_bank <= 1 && a.num_threads >= 0);
  REQUIRE(a.batch_invariant >= -1 && a.batch_invariant <= 1);
  Phase<Args>::require_documented(a);
  if (Phase<Args>::num_tokens(a) == 0) return;
  for (const Array& array : arrays) {
    if (!array.is_there()) continue;
    REQUIRE(reinterpret_cast<uintptr_t>(array.pointer) % array.element_size == 0);
    for (int d = 0; d < 2; ++d) REQUIRE(array.stride[d] >= 0 || array.count[d] == 1);
  }
}

template <typename Args>
void use_call(Input& input) {
  using This = Phase<Args>;
  Call<Args> call{This::defaults(), {}};
  call.args.dtype = static_cast<int32_t>(input.range(0, 2));
  call.args.float32_bank = static_cast<int32_t>(input.range(0, 1));
  call.args.num_threads = static_cast<int32_t>(input.range(0, 3));
  call.args.batch_invariant = static_cast<int32_t>(input.range(-1, 1));
  This::draw(input, call);
  fuzz::change_fields(input, call.args, This::kFields);
  fuzz::StructSize size{};
  CallerStruct caller = fuzz::draw_caller(input, call.args, This::defaults(), size);
  const Bytes caller_before = caller.bytes();
  const Args* args = caller.template as<Args>();
  const bool moderate = input.flag();
  std::mt19937 random(static_cast<unsigned>(input.range(0, 65535)));
  const bool has_dtype = is_dtype(call.args.dtype);
  if (has_dtype) fuzz::fill_wild(call.memory, call.args.dtype, random);

  const attnres_status verdict = This::check(args, 0);
  fuzz::require_message(verdict);
  const std::string message = verdict == ATTNRES_OK ? "" : attnres_last_error_message();
  const std::vector<Array> arrays = This::arrays(call);
  const int64_t num_tokens = This::num_tokens(call.args);
  const bool in_memory = has_dtype && fuzz::lies_in_memory(call.memory, arrays);
  const bool painted = in_memory && fuzz::can_be_painted(arrays);
  if (verdict == ATTNRES_OK) {
    REQUIRE(size.claimed <= fuzz::kMaxStructSize && size.claimed % 4 == 0);
    REQUIRE(size.claimed >= offsetof(Args, eps));
    require_documented(call.args, arrays);
    if (num_tokens > 0 && painted) REQUIRE(!fuzz::shares_a_written_byte(call.memory, arrays));
  } else {
    REQUIRE(verdict == ATTNRES_INVALID_ARGUMENT);
    const bool overlap = message.find(" no byte ") != std::string::npos;
    if (overlap && painted) {
      REQUIRE_SAYING(fuzz::shares_a_written_byte(call.memory, arrays), message);
    }
  }

  Bytes before = call.memory;
  // A device judges all that a host does, but for the number of threads, which it leaves alone; without a
  // library for one, calls end there.
  const attnres_status on_device = This::check(args, 1);
  fuzz::require_message(on_device);
  const bool threads_are_wrong = message.starts_with("num_threads: ");
  REQUIRE_SAYING(verdict == ATTNRES_OK || on_device != ATTNRES_OK || threads_are_wrong, message);
  if (on_device != ATTNRES_OK || attnres_num_permutations() == 0) {
    const attnres_status status = This::on_device(args);
    REQUIRE(status == on_device || (on_device == ATTNRES_OK && status == ATTNRES_UNSUPPORTED) ||
            (status == ATTNRES_OK && num_tokens == 0));
  }
  // An accepted call whose arrays lie elsewhere must not be made.
  if (verdict != ATTNRES_OK || painted || num_tokens == 0) {
    const bool runs = verdict == ATTNRES_OK && num_tokens > 0;
    if (runs && moderate) fill_moderate(call, arrays, random);
    before = call.memory;
    const attnres_status status = This::on_host(args);
    fuzz::require_message(status);
    // The number of threads is not judged before it is needed.
    const bool judges_threads =
        std::string_view(attnres_last_error_message()).starts_with("LIBATTNRES_NUM_THREADS: ");
    REQUIRE(status == verdict || (status == ATTNRES_INVALID_ARGUMENT && judges_threads));
    if (status == ATTNRES_OK && runs) {
      require_right(call, arrays, before, moderate);
    } else {
      REQUIRE(call.memory == before);
    }
  }
  REQUIRE(caller.bytes() == caller_before);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  if (input.flag()) {
    use_call<attnres_bank_args>(input);
  } else {
    use_call<attnres_merge_args>(input);
  }
  return 0;
}
