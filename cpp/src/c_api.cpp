// SPDX-License-Identifier: Apache-2.0
// The C border of the library: structs of any known age in, status codes and a message out.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "attnres/attnres.h"
#include "check.hpp"
#include "device_forward.hpp"
#include "error.hpp"
#include "host_forward.hpp"

namespace attnres {
namespace {

// A fixed buffer: recording a failure must not itself fail, and needs no destructor at thread exit.
thread_local char last_error_message[1024] = "";

attnres_status record(attnres_status status, const char* message) noexcept {
  std::snprintf(last_error_message, sizeof(last_error_message), "%s", message);
  for (char* c = last_error_message; *c != '\0'; ++c) *c = printable(*c);
  return status;
}

// Runs `body`; the one place where a C++ exception becomes a status and a message.
template <typename Body>
attnres_status guarded(Body&& body) noexcept {
  try {
    body();
    return ATTNRES_OK;
  } catch (const Error& error) {
    return record(error.status, error.message.c_str());
  } catch (const std::bad_alloc&) {
    return record(ATTNRES_INTERNAL_ERROR, "out of host memory");
  } catch (const std::exception& error) {
    return record(ATTNRES_INTERNAL_ERROR, error.what());
  } catch (...) {
    return record(ATTNRES_INTERNAL_ERROR, "unknown exception");
  }
}

template <typename T>
void require_pointer(const char* name, const T* pointer) {
  if (pointer == nullptr) {
    fail(ATTNRES_INVALID_ARGUMENT, std::string(name) + ": expected a pointer, got NULL");
  }
}

// No version of a struct comes near it: a size beyond is memory that was never set, and to believe it would be
// to read or write past the caller's struct.
constexpr size_t kMaxStructSize = 4096;

void require_struct_size(const char* name, size_t struct_size, size_t smallest) {
  if (struct_size < smallest) {
    fail(ATTNRES_INVALID_ARGUMENT, std::string(name) +
                                       ": expected struct_size >= " + std::to_string(smallest) +
                                       ", got " + std::to_string(struct_size));
  }
  if (struct_size > kMaxStructSize || struct_size % alignof(int32_t) != 0) {
    fail(ATTNRES_INVALID_ARGUMENT,
         std::string(name) + ": expected struct_size <= " + std::to_string(kMaxStructSize) +
             " that is a multiple of " + std::to_string(alignof(int32_t)) + ", got " +
             std::to_string(struct_size));
  }
}

#pragma GCC diagnostic push
// The fields that the macros leave out are 0.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
constexpr attnres_forward_args kDefaultArgs = ATTNRES_FORWARD_ARGS_INIT;
constexpr attnres_bank_args kDefaultBankArgs = ATTNRES_BANK_ARGS_INIT;
constexpr attnres_merge_args kDefaultMergeArgs = ATTNRES_MERGE_ARGS_INIT;
#pragma GCC diagnostic pop

// Tail padding would be read as the next version's first field.
template <typename Args>
constexpr bool kEndsWithLastField =
    offsetof(Args, batch_invariant) + sizeof(int32_t) == sizeof(Args);

// A caller's arguments in this library's layout. Fields that an older caller does not have keep
// their defaults; fields of a newer caller that this library does not have must be 0, their
// default.
template <typename Args>
Args read_args(const Args* caller, const Args& defaults) {
  static_assert(kEndsWithLastField<Args>);
  require_pointer("args", caller);
  const size_t size = caller->struct_size;
  // Everything before `eps` describes memory and has no default worth having.
  require_struct_size("args", size, offsetof(Args, eps));
  if (size == sizeof(Args)) [[likely]]
    return *caller;
  if (size > sizeof(Args)) {
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(caller);
    const bool known = std::all_of(bytes + sizeof(Args), bytes + size,
                                   [](unsigned char byte) { return byte == 0; });
    if (!known) {
      fail(ATTNRES_INVALID_ARGUMENT, "args: expected 0 in every field that libattnres " +
                                         std::string(attnres_version_string()) +
                                         " does not know, got another value");
    }
  }
  Args args = defaults;
  std::memcpy(&args, caller, std::min(size, sizeof(args)));
  args.struct_size = sizeof(args);
  return args;
}

// Asked on every call, as the variable that names the backend is.
int32_t default_batch_invariant() {
  constexpr const char* kVariable = "LIBATTNRES_BATCH_INVARIANT";
  const char* text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0' || std::strcmp(text, "0") == 0) [[likely]]
    return -1;
  if (std::strcmp(text, "1") == 0) return 1;
  fail(ATTNRES_INVALID_ARGUMENT,
       std::string(kVariable) + ": expected 0 or 1, got '" + std::string(text).substr(0, 40) + "'");
}

template <typename Args>
Args read_checked(const Args* caller, const Args& defaults, void (*check_args)(const Args&, bool),
                  bool on_device) {
  Args args = read_args(caller, defaults);
  check_args(args, on_device);
  if (args.batch_invariant == 0) args.batch_invariant = default_batch_invariant();
  return args;
}

attnres_forward_args read_checked_args(const attnres_forward_args* caller, bool on_device) {
  return read_checked(caller, kDefaultArgs, check, on_device);
}

attnres_bank_args read_checked_args(const attnres_bank_args* caller, bool on_device) {
  return read_checked(caller, kDefaultBankArgs, check_bank, on_device);
}

attnres_merge_args read_checked_args(const attnres_merge_args* caller, bool on_device) {
  return read_checked(caller, kDefaultMergeArgs, check_merge, on_device);
}

// Writes exactly the caller's struct: what it has no field for is dropped, what this library has no
// field for is 0.
template <typename Struct>
void write_result(Struct* caller, const Struct& result) {
  const size_t size = caller->struct_size;
  std::memcpy(caller, &result, std::min(size, sizeof(Struct)));
  if (size > sizeof(Struct)) {
    std::memset(reinterpret_cast<unsigned char*>(caller) + sizeof(Struct), 0,
                size - sizeof(Struct));
  }
  caller->struct_size = size;
}

template <typename Struct>
void require_result(const char* name, const Struct* caller, size_t smallest) {
  require_pointer(name, caller);
  require_struct_size(name, caller->struct_size, smallest);
}

constexpr size_t kSmallestPlan = offsetof(attnres_plan_info, ctas_per_sm);
constexpr size_t kSmallestProbe = offsetof(attnres_probe_info, device_name);
constexpr size_t kSmallestPermutation = sizeof(attnres_permutation);

#define ATTNRES_TEXT(value) #value
#define ATTNRES_VERSION_TEXT(major, minor, patch) \
  ATTNRES_TEXT(major) "." ATTNRES_TEXT(minor) "." ATTNRES_TEXT(patch)

}  // namespace
}  // namespace attnres

using namespace attnres;

extern "C" {

attnres_status attnres_forward(const attnres_forward_args* args, CUstream_st* stream) {
  return guarded([&] {
    const attnres_forward_args checked = read_checked_args(args, true);
    if (checked.num_tokens > 0) device_forward(checked, stream);
  });
}

attnres_status attnres_floor(const attnres_forward_args* args, CUstream_st* stream) {
  return guarded([&] {
    const attnres_forward_args checked = read_checked_args(args, true);
    if (checked.num_tokens > 0) device_floor(checked, stream);
  });
}

attnres_status attnres_forward_host(const attnres_forward_args* args) {
  return guarded([&] {
    const attnres_forward_args checked = read_checked_args(args, false);
    if (checked.num_tokens > 0) host_forward(checked);
  });
}

attnres_status attnres_bank(const attnres_bank_args* args, CUstream_st* stream) {
  return guarded([&] {
    const attnres_bank_args checked = read_checked_args(args, true);
    if (checked.num_bank_tokens > 0) device_bank(checked, stream);
  });
}

attnres_status attnres_merge(const attnres_merge_args* args, CUstream_st* stream) {
  return guarded([&] {
    const attnres_merge_args checked = read_checked_args(args, true);
    if (checked.num_tokens > 0) device_merge(checked, stream);
  });
}

attnres_status attnres_bank_floor(const attnres_bank_args* args, CUstream_st* stream) {
  return guarded([&] {
    const attnres_bank_args checked = read_checked_args(args, true);
    if (checked.num_bank_tokens > 0) device_bank_floor(checked, stream);
  });
}

attnres_status attnres_bank_host(const attnres_bank_args* args) {
  return guarded([&] {
    const attnres_bank_args checked = read_checked_args(args, false);
    if (checked.num_bank_tokens > 0) host_bank(checked);
  });
}

attnres_status attnres_merge_host(const attnres_merge_args* args) {
  return guarded([&] {
    const attnres_merge_args checked = read_checked_args(args, false);
    if (checked.num_tokens > 0) host_merge(checked);
  });
}

attnres_status attnres_check_bank(const attnres_bank_args* args, int32_t on_device) {
  return guarded([&] { read_checked_args(args, on_device != 0); });
}

attnres_status attnres_check_merge(const attnres_merge_args* args, int32_t on_device) {
  return guarded([&] { read_checked_args(args, on_device != 0); });
}

attnres_status attnres_check(const attnres_forward_args* args, int32_t on_device) {
  return guarded([&] { read_checked_args(args, on_device != 0); });
}

attnres_status attnres_plan(const attnres_forward_args* args, attnres_plan_info* plan) {
  return guarded([&] {
    require_result("plan", plan, kSmallestPlan);
    write_result(plan, plan_on_device(read_checked_args(args, true)));
  });
}

attnres_status attnres_plan_for(const attnres_forward_args* args, int32_t compute_major,
                                int32_t compute_minor, int32_t num_sms, attnres_plan_info* plan) {
  return guarded([&] {
    require_result("plan", plan, kSmallestPlan);
    write_result(plan,
                 plan_for(read_checked_args(args, true), compute_major, compute_minor, num_sms));
  });
}

attnres_status attnres_probe(int32_t device, attnres_probe_info* info) {
  return guarded([&] {
    require_result("info", info, kSmallestProbe);
    write_result(info, probe(device));
  });
}

attnres_status attnres_warmup(int32_t device) {
  return guarded([&] { warmup(device); });
}

int32_t attnres_num_permutations(void) { return num_permutations(); }

attnres_status attnres_get_permutation(int32_t index, attnres_permutation* permutation) {
  return guarded([&] {
    require_result("permutation", permutation, kSmallestPermutation);
    write_result(permutation, get_permutation(index));
  });
}

int32_t attnres_version(void) {
  return 10000 * ATTNRES_VERSION_MAJOR + 100 * ATTNRES_VERSION_MINOR + ATTNRES_VERSION_PATCH;
}

const char* attnres_version_string(void) {
  return ATTNRES_VERSION_TEXT(ATTNRES_VERSION_MAJOR, ATTNRES_VERSION_MINOR, ATTNRES_VERSION_PATCH);
}

const char* attnres_status_name(attnres_status status) {
  switch (status) {
    case ATTNRES_OK:
      return "ATTNRES_OK";
    case ATTNRES_INVALID_ARGUMENT:
      return "ATTNRES_INVALID_ARGUMENT";
    case ATTNRES_UNSUPPORTED:
      return "ATTNRES_UNSUPPORTED";
    case ATTNRES_CUDA_ERROR:
      return "ATTNRES_CUDA_ERROR";
    case ATTNRES_INTERNAL_ERROR:
      return "ATTNRES_INTERNAL_ERROR";
  }
  return "unknown attnres_status";
}

const char* attnres_last_error_message(void) { return last_error_message; }

}  // extern "C"
