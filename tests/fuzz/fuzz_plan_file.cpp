// SPDX-License-Identifier: Apache-2.0
// Fuzz target: the input is a plan file. What is accepted must be a plan that every call can use, means the
// same when it is written down again, and reads the same from a file; everything else must be one clean error.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <optional>
#include <string>

#include "error.hpp"
#include "fuzz_input.hpp"
#include "plan_choice.hpp"
#include "plan_file.hpp"

using namespace attnres;

namespace {

// A table with holes, as a build of the library has one.
int compiled(int kernel, int num_sources, int rows_per_stage, int cluster_size) {
  REQUIRE(num_sources >= 1 && num_sources <= kMaxSources);
  if (kernel == ATTNRES_KERNEL_CLUSTER) {
    REQUIRE(rows_per_stage == 0);
    return cluster_size == 2 || cluster_size == 4 || cluster_size == 7 ? 1 : 0;
  }
  REQUIRE(kernel == ATTNRES_KERNEL_RING && cluster_size == 0);
  if (rows_per_stage < 1 || rows_per_stage > 3) return 0;
  return rows_per_stage == 3 ? 1 : 2;
}

struct Outcome {
  std::optional<PlanFile> file;
  std::string message;
};

template <typename Read>
Outcome outcome_of(Read&& read) {
  try {
    return {read(), ""};
  } catch (const Error& error) {
    REQUIRE(error.status == ATTNRES_INVALID_ARGUMENT);
    REQUIRE_SAYING(fuzz::is_printable(error.message), error.message);
    // Room for it in the C interface's buffers.
    REQUIRE_SAYING(error.message.size() < sizeof(attnres_probe_info::plan_error), error.message);
    REQUIRE_SAYING(error.message.starts_with("LIBATTNRES_PLAN_FILE: "), error.message);
    return {std::nullopt, error.message};
  }
}

std::string max_entries_of(const PlanRow& row, int num_sms) {
  if (row.max_entries_per_sm == kUnbounded) return "unlimited";
  return std::to_string(std::llround(row.max_entries_per_sm * num_sms));
}

std::string rows_in_flight_of(const PlanRow& row) {
  const int rows = row.rows_in_flight;
  return rows == PlanRow{}.rows_in_flight ? "" : " rows_in_flight=" + std::to_string(rows);
}

std::string written(const PlanFile& file) {
  std::string text = "libattnres-plan 1\n";
  for (const PlanSection& section : file) {
    text += "device compute_capability=" + std::to_string(section.compute_major) + "." +
            std::to_string(section.compute_minor) + " num_sms=" + std::to_string(section.num_sms);
    if (!section.device_name.empty()) text += " name=" + section.device_name;
    text += "\n";
    for (const PlanRow& row : section.rows) {
      const char* const reads[] = {"any", "early", "after_wait"};
      text += std::string("row reads=") + reads[static_cast<int>(row.reads)];
      text += " max_sources=" + std::to_string(row.max_sources);
      text += " max_entries=" + max_entries_of(row, section.num_sms);
      text += row.kernel == ATTNRES_KERNEL_RING
                  ? " kernel=ring rows_per_stage=" + std::to_string(row.rows_per_stage) +
                        " ctas_per_sm=" + std::to_string(row.ctas_per_sm) + rows_in_flight_of(row)
                  : " kernel=cluster cluster_size=" + std::to_string(row.cluster_size);
      text += "\n";
    }
  }
  return text;
}

// Whatever a call asks of the section, it gets a kernel that exists.
void require_serves_every_call(const PlanSection& section) {
  for (int num_blocks = 0; num_blocks < kMaxSources; ++num_blocks) {
    for (const int64_t entries : {int64_t{1}, int64_t{24}, int64_t{65}, int64_t{1} << 40}) {
      for (const int pdl : {ATTNRES_PDL_WAIT, ATTNRES_PDL_EARLY}) {
        attnres_forward_args args{};
        args.num_blocks = num_blocks;
        args.num_tokens = args.num_bank_tokens = entries;
        args.pdl = pdl;
        const PlanRow row = choose_row(args, section.rows, section.num_sms);
        const int max_ctas =
            compiled(row.kernel, num_blocks + 1, row.rows_per_stage, row.cluster_size);
        REQUIRE(max_ctas >= 1 && row.ctas_per_sm <= max_ctas);
        REQUIRE((row.ctas_per_sm >= 1) == (row.kernel == ATTNRES_KERNEL_RING));
        REQUIRE(num_blocks + 1 <= row.max_sources);
      }
    }
  }
}

void require_equal(const PlanFile& a, const PlanFile& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    REQUIRE(a[i].compute_major == b[i].compute_major && a[i].compute_minor == b[i].compute_minor);
    REQUIRE(a[i].num_sms == b[i].num_sms && a[i].device_name == b[i].device_name);
    REQUIRE(a[i].rows == b[i].rows);
  }
}

Outcome read_back(std::string_view text) {
  const int descriptor = memfd_create("plan", MFD_CLOEXEC);
  REQUIRE(descriptor >= 0);
  REQUIRE(write(descriptor, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  const Outcome outcome = outcome_of([&] { return read_plan_file(path, compiled); });
  close(descriptor);
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = fuzz::Input(data, size).rest();
  const std::string path = "plan.txt";
  const Outcome parsed = outcome_of([&] { return parse_plan_file(path, text, compiled); });
  if (size % 8 == 0) {  // not always: it costs system calls
    const Outcome read = read_back(text);
    REQUIRE(parsed.file.has_value() == read.file.has_value());
    if (parsed.file) require_equal(*parsed.file, *read.file);
  }
  if (!parsed.file) return 0;
  REQUIRE(!parsed.file->empty());
  for (const PlanSection& section : *parsed.file) {
    require_serves_every_call(section);
    const PlanSection* found =
        find_section(*parsed.file, section.compute_major, section.compute_minor, section.num_sms,
                     section.device_name.c_str());
    REQUIRE(found == &section);
  }
  const Outcome again =
      outcome_of([&] { return parse_plan_file(path, written(*parsed.file), compiled); });
  REQUIRE_SAYING(again.file.has_value(), again.message);
  require_equal(*parsed.file, *again.file);
  return 0;
}
