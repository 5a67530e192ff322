// SPDX-License-Identifier: Apache-2.0
#include "host_threads.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace attnres {
namespace {

// How long a thread looks before it sleeps. Waking a sleeper costs the caller a system call and the
// helper some tens of microseconds, about as much as a decode step's call, and such calls come in
// bursts.
constexpr std::chrono::microseconds kSpin{50};

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns once value != unwanted.
void wait_while(const std::atomic<int>& value, int unwanted) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != unwanted) return;
      pause_briefly();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  while (value.load(std::memory_order_acquire) == unwanted) {
    value.wait(unwanted, std::memory_order_acquire);
  }
}

class HostPool {
 public:
  void run(int num_threads, HostBody body, void* context) {
    const std::unique_lock lock(busy_, std::try_to_lock);
    if (!lock) return body(context, 0);
    grow(num_threads - 1);
    body_ = body;
    context_ = context;
    const int helpers = std::min(num_threads - 1, static_cast<int>(helpers_.size()));
    for (int i = 0; i < helpers; ++i) {
      helpers_[i]->state.store(kPosted, std::memory_order_release);
      helpers_[i]->state.notify_one();
    }
    body(context, 0);
    for (int i = 0; i < helpers; ++i) {
      // Nothing is left to do, so a helper that has not begun need not: it may not even be running.
      int expected = kPosted;
      if (helpers_[i]->state.compare_exchange_strong(expected, kIdle, std::memory_order_acquire)) {
        continue;
      }
      wait_while(helpers_[i]->state, kWorking);
    }
  }

 private:
  enum State : int { kIdle, kPosted, kWorking };

  struct alignas(64) Helper {
    std::atomic<int> state{kIdle};
  };

  void grow(int count) {
    if (static_cast<int>(helpers_.size()) >= count) return;
    // Signals are the application's: its handlers must not run on these threads.
    sigset_t all;
    sigset_t previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    try {
      while (static_cast<int>(helpers_.size()) < count) {
        helpers_.reserve(helpers_.size() + 1);
        auto helper = std::make_unique<Helper>();
        std::thread(&HostPool::serve, this, helper.get(), static_cast<int>(helpers_.size()) + 1)
            .detach();
        helpers_.push_back(std::move(helper));
      }
    } catch (const std::system_error&) {
      // The process may have no more threads; fewer do the same work.
    } catch (const std::bad_alloc&) {
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  }

  void serve(Helper* helper, int participant) {
    for (;;) {
      wait_while(helper->state, kIdle);
      int expected = kPosted;
      if (!helper->state.compare_exchange_strong(expected, kWorking, std::memory_order_acquire)) {
        continue;
      }
      body_(context_, participant);
      helper->state.store(kIdle, std::memory_order_release);
      helper->state.notify_one();
    }
  }

  std::mutex busy_;  // held by the thread whose body runs
  HostBody body_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::unique_ptr<Helper>> helpers_;
};

// Never destroyed: helpers sleep in it until the process ends, so that neither exit() nor a return
// from main has to wait for them. (The library is linked with -z nodelete for the same reason.)
std::atomic<HostPool*> current_pool{nullptr};

// A forked child has the pool's memory but none of its threads, and maybe a lock that nobody will
// release: it starts over.
void forget_pool() { current_pool.store(nullptr, std::memory_order_relaxed); }
[[maybe_unused]] const int fork_handler_registered = pthread_atfork(nullptr, nullptr, forget_pool);

HostPool& pool() {
  HostPool* existing = current_pool.load(std::memory_order_acquire);
  if (existing != nullptr) return *existing;
  auto fresh = std::make_unique<HostPool>();
  if (current_pool.compare_exchange_strong(existing, fresh.get(), std::memory_order_acq_rel)) {
    return *fresh.release();
  }
  return *existing;
}

}  // namespace

void run_on_host_threads(int num_threads, HostBody body, void* context) {
  if (num_threads <= 1) return body(context, 0);
  pool().run(num_threads, body, context);
}

int num_available_cores() {
  static const int cores = [] {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
    // More cores than a cpu_set_t holds.
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }();
  return cores;
}

}  // namespace attnres
