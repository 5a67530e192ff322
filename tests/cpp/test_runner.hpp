// SPDX-License-Identifier: Apache-2.0
// The tests' own runner: a machine with a compiler and nothing else can run them. Include it in the
// one source file of a test program.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace test_runner {

constexpr int kSkipped = 77;  // exit code that CTest reports as skipped

struct Skip {
  std::string reason;
};

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline bool add(const char* name, void (*body)()) {
  cases().push_back({name, body});
  return true;
}

inline int failures_in_case = 0;

inline void fail(const char* file, int line, const std::string& what) {
  std::printf("%s:%d: %s\n", file, line, what.c_str());
  ++failures_in_case;
}

template <typename A, typename B>
void expect_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << "expected " << text << ", got " << a << " and " << b;
  fail(file, line, what.str());
}

}  // namespace test_runner

#define TEST_CASE(name)                                                            \
  static void name();                                                              \
  [[maybe_unused]] static const bool name##_added = test_runner::add(#name, name); \
  static void name()
#define EXPECT(condition) \
  ((condition) ? void() : test_runner::fail(__FILE__, __LINE__, "expected " #condition))
#define EXPECT_EQ(a, b) test_runner::expect_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// Runs the cases whose name contains the first argument, or all of them.
int main(int argc, char** argv) {
  int failed = 0, skipped = 0, ran = 0;
  for (const test_runner::Case& test : test_runner::cases()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    ++ran;
    test_runner::failures_in_case = 0;
    const char* verdict = "ok";
    try {
      test.body();
    } catch (const test_runner::Skip& skip) {
      std::printf("%s\n", skip.reason.c_str());
      verdict = "skipped";
      ++skipped;
    } catch (const std::exception& error) {
      test_runner::fail(test.name, 0, error.what());
    }
    if (test_runner::failures_in_case > 0) verdict = "FAILED", ++failed;
    std::printf("%-8s %s\n", verdict, test.name);
    std::fflush(stdout);
  }
  std::printf("%d run, %d failed, %d skipped\n", ran, failed, skipped);
  if (failed > 0 || ran == 0) return 1;
  return skipped == ran ? test_runner::kSkipped : 0;
}
