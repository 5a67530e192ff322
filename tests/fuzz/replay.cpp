// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target over files and folders of inputs: the committed corpus, with any compiler. Each input
// is also cut short at a few places and has some bytes changed, so that one file stands for several inputs.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fuzz_input.hpp"

namespace {

constexpr int kVariants = 8;

void run(const std::vector<uint8_t>& input) {
  // Exactly as long as the input, so that a sanitizer sees one byte too far.
  const std::vector<uint8_t> copy(input.begin(), input.end());
  LLVMFuzzerTestOneInput(copy.data(), copy.size());
}

void replay(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<uint8_t> input{std::istreambuf_iterator<char>(file), {}};
  // Before it runs: what crashes is the last one named.
  std::printf("%s (%zu bytes)\n", path.filename().c_str(), input.size());
  std::fflush(stdout);
  run(input);
  if (input.empty()) return;
  std::mt19937 random(static_cast<unsigned>(input.size()));
  for (int i = 0; i < kVariants; ++i) {
    std::vector<uint8_t> variant = input;
    if (i % 2 == 0) variant.resize(random() % input.size());
    for (int change = 0; change < i / 2 && !variant.empty(); ++change) {
      variant[random() % variant.size()] = static_cast<uint8_t>(random());
    }
    run(variant);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> inputs;
  for (int i = 1; i < argc; ++i) {
    if (!std::filesystem::is_directory(argv[i])) {
      inputs.emplace_back(argv[i]);
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      inputs.push_back(entry.path());
    }
  }
  std::sort(inputs.begin(), inputs.end());
  for (const std::filesystem::path& path : inputs) replay(path);
  std::printf("%zu inputs\n", inputs.size());
  return inputs.empty() ? 1 : 0;
}
