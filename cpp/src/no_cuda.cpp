// SPDX-License-Identifier: Apache-2.0
// The CUDA side of a library that was built with ATTNRES_CUDA=OFF: it has no kernel and says so.
#include <cstdio>

#include "device_forward.hpp"
#include "error.hpp"

namespace attnres {
namespace {

constexpr const char* kReason = "this libattnres was built without CUDA (ATTNRES_CUDA=OFF)";

}  // namespace

void device_forward(const attnres_forward_args&, CUstream_st*) {
  fail(ATTNRES_UNSUPPORTED, kReason);
}

void device_bank(const attnres_bank_args&, CUstream_st*) { fail(ATTNRES_UNSUPPORTED, kReason); }

void device_merge(const attnres_merge_args&, CUstream_st*) { fail(ATTNRES_UNSUPPORTED, kReason); }

void device_bank_floor(const attnres_bank_args&, CUstream_st*) {
  fail(ATTNRES_UNSUPPORTED, kReason);
}

void device_floor(const attnres_forward_args&, CUstream_st*) { fail(ATTNRES_UNSUPPORTED, kReason); }

attnres_plan_info plan_on_device(const attnres_forward_args&) {
  fail(ATTNRES_UNSUPPORTED, kReason);
}

attnres_plan_info plan_for(const attnres_forward_args&, int, int, int) {
  fail(ATTNRES_UNSUPPORTED, kReason);
}

attnres_probe_info probe(int device) {
  attnres_probe_info info{};
  info.struct_size = sizeof(info);
  info.device = device < 0 ? 0 : device;
  std::snprintf(info.reason, sizeof(info.reason), "%s", kReason);
  return info;
}

void warmup(int) { fail(ATTNRES_UNSUPPORTED, kReason); }

int num_permutations() { return 0; }

attnres_permutation get_permutation(int index) {
  fail(ATTNRES_INVALID_ARGUMENT,
       "index: expected 0 <= index < 0 (built without CUDA), got " + std::to_string(index));
}

}  // namespace attnres
