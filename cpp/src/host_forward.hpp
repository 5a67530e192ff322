// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attnres/attnres.h"

namespace attnres {

// The operator on the CPU, for arguments that check(args, false) accepts.
void host_forward(const attnres_forward_args& args);

// The two phases, for arguments that check_bank(args, false) and check_merge(args, false) accept.
void host_bank(const attnres_bank_args& args);
void host_merge(const attnres_merge_args& args);

}  // namespace attnres
