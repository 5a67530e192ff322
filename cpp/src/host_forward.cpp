// SPDX-License-Identifier: Apache-2.0
// The host backend around the vectorised kernels: which instruction set, how many threads, who does
// which tokens.
#include "host_forward.hpp"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "error.hpp"
#include "host_threads.hpp"
#include "host_token.hpp"

namespace attnres {
namespace {

constexpr const char* kThreadsVariable = "LIBATTNRES_NUM_THREADS";
constexpr const char* kTargetVariable = "LIBATTNRES_HOST_TARGET";
constexpr int kMaxThreads = 1024;

// Less than this for a thread, in bytes read, costs more to hand over than to do.
constexpr int64_t kMinBytesPerThread = 128 * 1024;

// Best first.
constexpr const HostKernels* kTargets[] = {
#if defined(ATTNRES_HOST_AVX512)
    &kAvx512Kernels,
#endif
#if defined(ATTNRES_HOST_AVX2)
    &kAvx2Kernels,
#endif
    &kBaselineKernels,
};

bool runs_here(const HostKernels* kernels) {
#if defined(ATTNRES_HOST_AVX2)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (kernels == &kAvx2Kernels) return has_avx2;
#endif
#if defined(ATTNRES_HOST_AVX512)
  if (kernels == &kAvx512Kernels) {
    return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return kernels == &kBaselineKernels;
}

const HostKernels& find_target(const char* wanted) {
  std::string usable;
  for (const HostKernels* kernels : kTargets) {
    if (!runs_here(kernels)) continue;
    if (wanted == nullptr || std::strcmp(wanted, kernels->target) == 0) return *kernels;
    usable += (usable.empty() ? "" : ", ") + std::string(kernels->target);
  }
  fail(ATTNRES_INVALID_ARGUMENT,
       std::string(kTargetVariable) + ": expected one of " + usable + ", got '" + wanted + "'");
}

const HostKernels& host_kernels() {
  // An exception leaves it unset, so a bad value is refused at each call.
  static const HostKernels& kernels = [&]() -> const HostKernels& {
    const char* wanted = std::getenv(kTargetVariable);
    return find_target(wanted != nullptr && *wanted == '\0' ? nullptr : wanted);
  }();
  return kernels;
}

int requested_threads(const attnres_forward_args& args) {
  if (args.num_threads > 0) return std::min(args.num_threads, kMaxThreads);
  const char* text = std::getenv(kThreadsVariable);
  if (text == nullptr || *text == '\0') return num_available_cores();
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [parsed, error] = std::from_chars(text, end, value);
  if (error != std::errc() || parsed != end || value < 1) {
    fail(ATTNRES_INVALID_ARGUMENT,
         std::string(kThreadsVariable) + ": expected an integer >= 1, got '" + text + "'");
  }
  return std::min(value, kMaxThreads);
}

// Round to nearest and no flushing of subnormals, whatever the application set on whichever thread:
// the bits of a result must not depend on the thread that computed it.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&previous_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&previous_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t previous_;
};

// One call, shared by the threads that work on it.
struct HostCall {
  const attnres_forward_args& args;
  HostKernels::ForwardTokens forward_tokens;
  const float* query;
  float* mixed;  // one row per participant
  int64_t row_floats;
  int64_t tokens_per_turn;
  std::atomic<int64_t> next_token{0};
};

void take_turns(void* context, int participant) {
  HostCall& call = *static_cast<HostCall*>(context);
  const DefaultFloatEnvironment environment;
  float* mixed = call.mixed + participant * call.row_floats;
  for (;;) {
    const int64_t begin =
        call.next_token.fetch_add(call.tokens_per_turn, std::memory_order_relaxed);
    if (begin >= call.args.num_tokens) return;
    const int64_t end = std::min(begin + call.tokens_per_turn, call.args.num_tokens);
    call.forward_tokens(call.args, call.query, begin, end, mixed);
  }
}

// Small enough to share the work evenly, large enough that tokens of one bank entry stay together.
int64_t tokens_per_turn(const attnres_forward_args& args, int threads) {
  const int64_t prefixes_per_entry = args.num_tokens / args.num_bank_tokens;
  const int64_t share = args.num_tokens / threads;
  const int64_t turn = std::clamp<int64_t>(share / 8, 1, 16);
  const int64_t whole_entries = (turn + prefixes_per_entry - 1) / prefixes_per_entry;
  return std::min(whole_entries * prefixes_per_entry, std::max<int64_t>(share, 1));
}

}  // namespace

void host_forward(const attnres_forward_args& args) {
  const HostKernels& kernels = host_kernels();
  const int64_t element_size = args.dtype == ATTNRES_FLOAT32 ? 4 : 2;
  const int64_t rows_per_token = args.num_blocks + (args.delta != nullptr ? 2 : 1);
  // Saturating: sizes were checked to fit an address space, not their product with the rows.
  int64_t bytes = 0;
  if (__builtin_mul_overflow(args.num_tokens * rows_per_token, args.hidden_size * element_size,
                             &bytes)) {
    bytes = INT64_MAX;
  }
  const int threads = static_cast<int>(
      std::max<int64_t>(1, std::min({static_cast<int64_t>(requested_threads(args)), args.num_tokens,
                                     bytes / kMinBytesPerThread})));

  // Kept by the calling thread from call to call: fresh pages would cost more than the arithmetic.
  static thread_local std::vector<float> scratch;
  const int64_t row_floats =
      (args.hidden_size + kScratchFloats - 1) / kScratchFloats * kScratchFloats;
  const size_t needed = static_cast<size_t>(row_floats) * (threads + 1) + kScratchFloats;
  if (scratch.size() < needed) scratch.resize(needed);
  constexpr uintptr_t kAlignment = kScratchFloats * sizeof(float);
  float* query = reinterpret_cast<float*>(
      (reinterpret_cast<uintptr_t>(scratch.data()) + kAlignment - 1) / kAlignment * kAlignment);

  {
    const DefaultFloatEnvironment environment;
    kernels.prepare_query[args.dtype](args, query);
  }
  HostCall call{args,       kernels.forward_tokens[args.dtype], query, query + row_floats,
                row_floats, tokens_per_turn(args, threads)};
  run_on_host_threads(threads, take_turns, &call);
}

}  // namespace attnres
