// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attnres/attnres.h"

namespace attnres {

// The operator on the CPU, for arguments that check(args, false) accepts.
void host_forward(const attnres_forward_args& args);

}  // namespace attnres
