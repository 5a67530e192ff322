// SPDX-License-Identifier: Apache-2.0
// Fuzz target: the input describes one use of the C interface. Structs are of every size, each in memory of
// exactly that size; arrays lie in one block of memory, at places that may overlap, and any field may be
// replaced by any value. A refused call must have changed no byte; an accepted one must be one that the
// header allows, change the bytes that it says and no other, and leave the right numbers in them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
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
using fuzz::for_each_row;
using fuzz::Input;
using fuzz::kMaxStructSize;
using fuzz::require_message;
using fuzz::row_of;
using fuzz::StructSize;

namespace {

attnres_forward_args default_args() {
  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  return args;
}

// The functions that fill a caller's struct.
void use_result_struct(Input& input) {
  const int which = static_cast<int>(input.range(0, 3));
  const size_t sizes[] = {sizeof(attnres_probe_info), sizeof(attnres_permutation),
                          sizeof(attnres_plan_info), sizeof(attnres_plan_info)};
  const StructSize size = fuzz::draw_struct_size(input, sizes[which]);
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

enum ArrayIndex { kOutput, kPrefix, kBlocks, kDelta, kNormWeight, kQkWeight, kOutputNormWeight };

std::vector<Array> arrays_of(const attnres_forward_args& a) {
  const int64_t m = a.num_tokens, h = a.hidden_size;
  const bool has_dtype = a.dtype >= ATTNRES_BFLOAT16 && a.dtype <= ATTNRES_FLOAT32;
  const int size = has_dtype ? format_of(a.dtype).size : 1;
  return {{a.output, {m, 1}, {a.output_stride, 0}, true, h, size},
          {a.prefix, {m, 1}, {a.prefix_stride, 0}, a.delta != nullptr, h, size},
          {a.blocks,
           {a.num_bank_tokens, a.num_bank_rows},
           {a.blocks_token_stride, a.blocks_row_stride},
           a.block_write_idx >= 0,
           h,
           size},
          {a.delta, {m, 1}, {a.delta_stride, 0}, false, h, size},
          {a.norm_weight, {1, 1}, {0, 0}, false, h, size},
          {a.qk_weight, {1, 1}, {0, 0}, false, h, size},
          {a.output_norm_weight, {1, 1}, {0, 0}, false, h, size}};
}

struct Call {
  attnres_forward_args args;  // as the library understands the caller's struct
  Bytes memory;
  bool moderate = false;  // every number that is read is of a size that float32 takes in its stride

  int element_size() const { return format_of(args.dtype).size; }
  int64_t offset_of(const void* pointer) const { return fuzz::offset_of(memory, pointer); }
  int64_t row_offset(const Array& array, int64_t i, int64_t j) const {
    return fuzz::row_offset(memory, array, i, j);
  }
  int64_t row_bytes() const { return args.hidden_size * element_size(); }
};

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

// Numbers near one where the call reads, NaN everywhere else, bank rows that it must not read included.
void fill_moderate(Call& call, std::mt19937& random) {
  std::fill(call.memory.begin(), call.memory.end(), 0xff);
  std::vector<Array> read = arrays_of(call.args);
  read[kBlocks].count[1] = call.args.num_blocks;
  read.erase(read.begin() + kOutput);
  for (const Array& array : read) {
    for_each_row(call.memory, array, [&](int64_t row) {
      for (int64_t i = 0; i < call.args.hidden_size; ++i) {
        encode(call.args.dtype, fuzz::moderate_number(random),
               &call.memory[row + i * call.element_size()]);
      }
    });
  }
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
    if (!call_.moderate || h > fuzz::kMaxJudgedSize) return;
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
    std::vector<fuzz::Score> scores;
    for (const std::vector<double>& v : sources) scores.push_back(fuzz::score_of(v, query, a_.eps));
    fuzz::ExpectedRow row = fuzz::mixed_row(sources, scores);
    if (a_.output_norm_weight != nullptr) fuzz::apply_norm(row, weight, a_.output_norm_eps);
    for (int64_t k = 0; k < h; ++k) {
      fuzz::require_near(row, k, element(after_, output_row, k), a_.dtype, "output");
    }
  }

  const Call& call_;
  const Bytes& before_;
  const Bytes& after_;
  const attnres_forward_args& a_;
  const std::vector<Array> arrays_;
};

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

void use_call(Input& input) {
  Call call = draw_call(input);
  fuzz::change_fields(input, call.args, kFields);
  StructSize size{};
  CallerStruct caller = fuzz::draw_caller(input, call.args, default_args(), size);
  const Bytes caller_before = caller.bytes();
  const attnres_forward_args* args = caller.as<attnres_forward_args>();
  call.moderate = input.flag();
  std::mt19937 random(static_cast<unsigned>(input.range(0, 65535)));
  const bool has_dtype = call.args.dtype >= ATTNRES_BFLOAT16 && call.args.dtype <= ATTNRES_FLOAT32;
  if (has_dtype) fuzz::fill_wild(call.memory, call.args.dtype, random);

  const attnres_status verdict = attnres_check(args, 0);
  require_message(verdict);
  const std::string message = verdict == ATTNRES_OK ? "" : attnres_last_error_message();
  const std::vector<Array> arrays = arrays_of(call.args);
  const bool in_memory = has_dtype && fuzz::lies_in_memory(call.memory, arrays);
  const bool painted = in_memory && fuzz::can_be_painted(arrays);
  if (verdict == ATTNRES_OK) {
    REQUIRE(size.claimed <= kMaxStructSize && size.claimed % 4 == 0);
    REQUIRE(size.claimed >= offsetof(attnres_forward_args, eps));
    require_documented(call.args);
    if (call.args.num_tokens > 0 && painted)
      REQUIRE(!fuzz::shares_a_written_byte(call.memory, arrays));
  } else {
    REQUIRE(verdict == ATTNRES_INVALID_ARGUMENT);
    const bool overlap = message.find(" no byte ") != std::string::npos;
    if (overlap && painted)
      REQUIRE_SAYING(fuzz::shares_a_written_byte(call.memory, arrays), message);
  }

  Bytes before = call.memory;
  // A device judges all that a host does, but for the number of threads, which it leaves alone; without a
  // library for one, calls end there.
  const attnres_status on_device = attnres_check(args, 1);
  require_message(on_device);
  const bool threads_are_wrong = message.starts_with("num_threads: ");
  REQUIRE_SAYING(verdict == ATTNRES_OK || on_device != ATTNRES_OK || threads_are_wrong, message);
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
