// SPDX-License-Identifier: Apache-2.0
// The CUDA side of the library as c_api.cpp sees it. Every function throws Error.
// Built either from device.cpp, plan.cpp, device_forward.cpp, device_two_phase.cpp and the registries, or,
// without CUDA, from no_cuda.cpp.
#pragma once

#include "attnres/attnres.h"

namespace attnres {

// Launch the operator for arguments that check(args, true) accepts.
void device_forward(const attnres_forward_args& args, CUstream_st* stream);

// Launch the two phases for arguments that check_bank(args, true) and check_merge(args, true) accept.
void device_bank(const attnres_bank_args& args, CUstream_st* stream);
void device_merge(const attnres_merge_args& args, CUstream_st* stream);

// Launch the floor kernels for the same arguments as the kernels.
void device_bank_floor(const attnres_bank_args& args, CUstream_st* stream);
void device_floor(const attnres_forward_args& args, CUstream_st* stream);

// What device_forward would launch on the device of `args`.
attnres_plan_info plan_on_device(const attnres_forward_args& args);

// The same for a described GPU.
attnres_plan_info plan_for(const attnres_forward_args& args, int compute_major, int compute_minor,
                           int num_sms);

attnres_probe_info probe(int device);
void warmup(int device);

int num_permutations();
attnres_permutation get_permutation(int index);

}  // namespace attnres
