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
constexpr int64_t kMinBytesPerThread = int64_t{128} * 1024;

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

int requested_threads(int32_t num_threads) {
  if (num_threads > 0) return std::min(num_threads, kMaxThreads);
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
template <typename Args>
struct HostCall {
  const Args& args;
  HostKernels::Tokens<Args> work;
  int64_t num_tokens;
  int64_t tokens_per_turn;
  const float* query;
  float* own;  // so many floats per participant
  int64_t own_floats;
  std::atomic<int64_t> next_token{0};
};

template <typename Args>
void take_turns(void* context, int participant) {
  HostCall<Args>& call = *static_cast<HostCall<Args>*>(context);
  const DefaultFloatEnvironment environment;
  float* own = call.own + participant * call.own_floats;
  for (;;) {
    const int64_t begin =
        call.next_token.fetch_add(call.tokens_per_turn, std::memory_order_relaxed);
    if (begin >= call.num_tokens) return;
    const int64_t end = std::min(begin + call.tokens_per_turn, call.num_tokens);
    call.work(call.args, call.query, begin, end, own);
  }
}

// Small enough to share the work evenly, large enough that tokens of one bank entry stay together.
int64_t tokens_per_turn(int64_t num_tokens, int64_t prefixes_per_entry, int threads) {
  const int64_t share = num_tokens / threads;
  const int64_t turn = std::clamp<int64_t>(share / 8, 1, 16);
  const int64_t whole_entries = (turn + prefixes_per_entry - 1) / prefixes_per_entry;
  return std::min(whole_entries * prefixes_per_entry, std::max<int64_t>(share, 1));
}

int64_t padded_floats(int64_t floats) {
  return (floats + kScratchFloats - 1) / kScratchFloats * kScratchFloats;
}

// Kept by the calling thread from call to call: fresh pages would cost more than the arithmetic.
float* scratch_floats(size_t count) {
  static thread_local std::vector<float> scratch;
  if (scratch.size() < count + kScratchFloats) scratch.resize(count + kScratchFloats);
  constexpr uintptr_t kAlignment = kScratchFloats * sizeof(float);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.data()) + kAlignment - 1) /
                                  kAlignment * kAlignment);
}

// What a call needs of its surroundings.
struct HostWork {
  int64_t num_tokens;
  int64_t prefixes_per_entry;
  int64_t rows_per_token;  // about how many are moved, which says how many threads are worth waking
  int64_t num_queries;
  int64_t own_floats;  // of each thread
};

// `prepare(queries)` fills the queries, a padded row each.
template <typename Args, typename Prepare>
void run_on_threads(const Args& args, const HostWork& work, HostKernels::Tokens<Args> tokens,
                    Prepare prepare) {
  const int64_t element_size = args.dtype == ATTNRES_FLOAT32 ? 4 : 2;
  // Saturating: sizes were checked to fit an address space, not their product with the rows.
  int64_t bytes = 0;
  if (__builtin_mul_overflow(work.num_tokens * work.rows_per_token, args.hidden_size * element_size,
                             &bytes)) {
    bytes = INT64_MAX;
  }
  const int threads = static_cast<int>(
      std::max<int64_t>(1, std::min({static_cast<int64_t>(requested_threads(args.num_threads)),
                                     work.num_tokens, bytes / kMinBytesPerThread})));

  const int64_t query_floats = padded_floats(args.hidden_size) * work.num_queries;
  float* query = scratch_floats(static_cast<size_t>(query_floats) +
                                static_cast<size_t>(work.own_floats) * threads);
  {
    const DefaultFloatEnvironment environment;
    prepare(query);
  }
  HostCall<Args> call{args,
                      tokens,
                      work.num_tokens,
                      tokens_per_turn(work.num_tokens, work.prefixes_per_entry, threads),
                      query,
                      query + query_floats,
                      work.own_floats};
  run_on_host_threads(threads, take_turns<Args>, &call);
}

}  // namespace

void host_forward(const attnres_forward_args& args) {
  const HostKernels& kernels = host_kernels();
  const HostWork work{args.num_tokens, args.num_tokens / args.num_bank_tokens,
                      args.num_blocks + (args.delta != nullptr ? 2 : 1), 1,
                      padded_floats(args.hidden_size)};
  run_on_threads(args, work, kernels.forward_tokens[args.dtype], [&](float* query) {
    kernels.prepare_query[args.dtype](args.norm_weight, args.qk_weight, args.hidden_size, query);
  });
}

void host_bank(const attnres_bank_args& args) {
  const HostKernels& kernels = host_kernels();
  const int64_t row_floats = padded_floats(args.hidden_size);
  const HostWork work{args.num_bank_tokens, 1, args.num_blocks + args.num_sites, args.num_sites,
                      row_floats + padded_floats(int64_t{kMaxHostBankRows} * args.num_sites)};
  run_on_threads(args, work, kernels.bank_tokens[args.dtype], [&](float* queries) {
    const int64_t element_size = args.dtype == ATTNRES_FLOAT32 ? 4 : 2;
    const auto* norm_weights = static_cast<const unsigned char*>(args.norm_weights);
    const auto* qk_weights = static_cast<const unsigned char*>(args.qk_weights);
    for (int64_t site = 0; site < args.num_sites; ++site) {
      kernels.prepare_query[args.dtype](
          norm_weights + site * args.norm_weights_stride * element_size,
          qk_weights + site * args.qk_weights_stride * element_size, args.hidden_size,
          queries + site * row_floats);
    }
  });
}

void host_merge(const attnres_merge_args& args) {
  const HostKernels& kernels = host_kernels();
  const HostWork work{args.num_tokens, args.num_tokens / args.num_bank_tokens,
                      args.delta != nullptr ? 3 : 2, 1, padded_floats(args.hidden_size)};
  run_on_threads(args, work, kernels.merge_tokens[args.dtype], [&](float* query) {
    kernels.prepare_query[args.dtype](args.norm_weight, args.qk_weight, args.hidden_size, query);
  });
}

}  // namespace attnres
