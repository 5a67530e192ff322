// SPDX-License-Identifier: Apache-2.0
// The host backend's threads: started when first needed, kept, and replaced in a forked child.
#pragma once

namespace attnres {

using HostBody = void (*)(void* context, int participant);

// Calls body(context, i) for i = 0 (on the calling thread) and for any number, possibly none, of
// the distinct i in 1..num_threads-1, each on its own thread; returns when all of them have
// returned. So a body takes work from a shared counter until none is left, and must not throw. Safe
// to call from several threads: one of them gets the helpers, the others work alone.
void run_on_host_threads(int num_threads, HostBody body, void* context);

// Cores that this process may use.
int num_available_cores();

}  // namespace attnres
