// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attnres/attnres.h"

namespace attnres {

// Throws Error(ATTNRES_INVALID_ARGUMENT) naming the argument, what was expected and what came, or, for
// a valid call that no native kernel can serve (`on_device`), Error(ATTNRES_UNSUPPORTED). No pointer is
// dereferenced.
void check(const attnres_forward_args& args, bool on_device);
void check_bank(const attnres_bank_args& args, bool on_device);
void check_merge(const attnres_merge_args& args, bool on_device);

}  // namespace attnres
