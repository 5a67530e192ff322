// SPDX-License-Identifier: Apache-2.0
// The plan file: what is read from it, and that whatever else it holds is an error with file and line.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>

#include "error.hpp"
#include "plan_file.hpp"
#include "test_runner.hpp"

using namespace attnres;

namespace {

// As the library's own table of permutations, without needing one.
int compiled(int kernel, int num_sources, int rows_per_stage, int cluster_size) {
  if (num_sources < 1 || num_sources > 9) return 0;
  if (kernel == ATTNRES_KERNEL_CLUSTER) return cluster_size == 2 || cluster_size == 4 ? 1 : 0;
  return rows_per_stage < 1 || rows_per_stage > 3 ? 0 : rows_per_stage <= 2 ? 2 : 1;
}

const std::string kLast =
    "row reads=any max_sources=9 max_entries=unlimited kernel=ring rows_per_stage=2 "
    "ctas_per_sm=2\n";
const std::string kDevice = "device compute_capability=9.0 num_sms=132 name=NVIDIA H200\n";
const std::string kHeader = "libattnres-plan 1\n";

PlanFile parse(const std::string& text) { return parse_plan_file("p.txt", text, compiled); }

// The message, or what tells that there was none.
std::string error_of(const std::string& text) {
  try {
    parse(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.status, ATTNRES_INVALID_ARGUMENT);
    return error.message;
  }
  return "accepted";
}

std::string read_error(const std::string& path) {
  try {
    read_plan_file(path, compiled);
  } catch (const Error& error) {
    EXPECT_EQ(error.status, ATTNRES_INVALID_ARGUMENT);
    return error.message;
  }
  return "accepted";
}

// Refused, with this line and text.
void expect_refused(const std::string& text, int line, const std::string& what) {
  const std::string where = line == 0 ? "" : ", line " + std::to_string(line);
  EXPECT_EQ(error_of(text), "LIBATTNRES_PLAN_FILE: p.txt" + where + ": " + what);
}

// Line 3 of an otherwise right file.
void expect_row_refused(const std::string& row, const std::string& what) {
  expect_refused(kHeader + kDevice + row + "\n" + kLast, 3, what);
}

class Folder {
 public:
  Folder() {
    if (mkdtemp(path_) == nullptr) throw std::runtime_error("mkdtemp failed");
  }
  ~Folder() {
    for (const std::string& name : names_) std::remove(name.c_str());
    rmdir(path_);
  }
  std::string path() const { return path_; }
  std::string name(const char* leaf) {
    names_.push_back(path() + "/" + leaf);
    return names_.back();
  }
  std::string write(const char* leaf, const std::string& text) {
    std::ofstream(name(leaf), std::ios::binary) << text;
    return names_.back();
  }

 private:
  char path_[32] = "/tmp/attnres_plan_XXXXXX";
  std::vector<std::string> names_;
};

}  // namespace

TEST_CASE(every_column_is_read) {
  const PlanFile file = parse(
      "\n  # Comment.\r\nlibattnres-plan 1\r\n\n" + kDevice +
      "\trow  kernel=cluster cluster_size=4\treads=after_wait max_sources=5 max_entries=24  \n"
      "row reads=early max_sources=9 max_entries=264 kernel=ring rows_per_stage=3 ctas_per_sm=1 "
      "rows_in_flight=6\n"
      "#row\n" +
      kLast + "device num_sms=148 compute_capability=10.3\n" + kLast);
  EXPECT_EQ(file.size(), size_t{2});
  const PlanSection& h200 = file[0];
  EXPECT_EQ(h200.compute_major, 9);
  EXPECT_EQ(h200.compute_minor, 0);
  EXPECT_EQ(h200.num_sms, 132);
  EXPECT_EQ(h200.device_name, "NVIDIA H200");
  EXPECT_EQ(h200.line, 5);
  EXPECT_EQ(h200.rows.size(), size_t{3});
  EXPECT(h200.rows[0] == cluster_row(Reads::kAfterWait, 5, 24.0 / 132, 4));
  EXPECT(h200.rows[1] == ring_row(Reads::kEarly, 9, 264.0 / 132, 3, 1, 6));
  EXPECT(h200.rows[2] == ring_row(Reads::kAny, 9, kUnbounded, 2, 2));
  EXPECT_EQ(file[1].compute_minor, 3);
  EXPECT_EQ(file[1].device_name, "");
}

TEST_CASE(last_line_needs_no_line_feed) {
  EXPECT_EQ(parse(kHeader + kDevice + kLast.substr(0, kLast.size() - 1)).size(), size_t{1});
}

TEST_CASE(section_is_found_by_device) {
  const PlanFile file =
      parse(kHeader + "device compute_capability=9.0 num_sms=132\n" + kLast + kDevice + kLast);
  EXPECT_EQ(find_section(file, 9, 0, 132, "NVIDIA H200"), &file[1]);
  EXPECT_EQ(find_section(file, 9, 0, 132, "NVIDIA H100"), &file[0]);
  EXPECT_EQ(find_section(file, 9, 0, 132, nullptr), &file[0]);
  EXPECT(find_section(file, 9, 0, 114, nullptr) == nullptr);
  EXPECT(find_section(file, 10, 0, 132, nullptr) == nullptr);
  const PlanFile named = parse(kHeader + kDevice + kLast);
  EXPECT(find_section(named, 9, 0, 132, "NVIDIA H100") == nullptr);
  EXPECT_EQ(find_section(named, 9, 0, 132, nullptr), named.data());
}

TEST_CASE(header_comes_first_and_names_the_version) {
  expect_refused("", 0, "expected 'libattnres-plan 1', got an empty file");
  expect_refused("# nothing\n\n", 0, "expected 'libattnres-plan 1', got an empty file");
  expect_refused(kHeader, 0, "expected a device line, got none");
  expect_refused("libattnres-plan 2\n" + kDevice + kLast, 1,
                 "expected 'libattnres-plan 1' first, got 'libattnres-plan 2'");
  expect_refused("\n" + kDevice + kLast, 2,
                 "expected 'libattnres-plan 1' first, got 'device compute_capability=9.0 "
                 "num_sms=13...'");
}

TEST_CASE(unknown_lines_and_keys_are_refused) {
  expect_refused(kHeader + kLast, 2, "expected a device line before the first row, got a row");
  expect_row_refused("include /etc/passwd",
                     "expected a line that starts with device, row or #, got 'include'");
  expect_row_refused("row reads=any speed=3",
                     "expected a key among reads, max_sources, max_entries, kernel, "
                     "rows_per_stage, ctas_per_sm, rows_in_flight, cluster_size, got 'speed'");
  expect_row_refused("row reads=any reads=early", "reads: expected once, got it twice");
  expect_row_refused("row reads", "expected key=value, got 'reads'");
  expect_row_refused("row reads =any", "expected key=value, got 'reads'");
  expect_row_refused("row =any",
                     "expected a key among reads, max_sources, max_entries, kernel, "
                     "rows_per_stage, ctas_per_sm, rows_in_flight, cluster_size, got ''");
  expect_row_refused("row reads=any", "max_sources: expected a value, got none");
  expect_refused(kHeader + kDevice + kLast + kDevice + kLast, 4,
                 "device: expected each once, got the one of line 2 again");
}

TEST_CASE(bad_values_are_refused) {
  const std::string rest = " max_sources=9 max_entries=8 kernel=cluster cluster_size=4";
  expect_row_refused("row reads=late" + rest,
                     "reads: expected any, early or after_wait, got 'late'");
  for (const char* wrong : {"0", "10", "-1", "+3", "0x3", "3.0", "1e0", "", "three", "3;",
                            "99999999999999999999", "nan"}) {
    expect_row_refused(
        std::string("row reads=any max_entries=8 kernel=cluster cluster_size=4 max_sources=") +
            wrong,
        std::string("max_sources: expected a number from 1 to 9, got '") + wrong + "'");
  }
  for (const char* wrong : {"0", "-5", "inf", "1.5", "2147483648", ""}) {
    expect_row_refused(
        std::string("row reads=any max_sources=9 kernel=cluster cluster_size=4 max_entries=") +
            wrong,
        std::string("max_entries: expected a number >= 1 or unlimited, got '") + wrong + "'");
  }
  const std::string bounds = "row reads=any max_sources=9 max_entries=8 ";
  expect_row_refused(bounds + "kernel=triton", "kernel: expected ring or cluster, got 'triton'");
  expect_row_refused(bounds + "kernel=ring rows_per_stage=2",
                     "ctas_per_sm: expected a value, got none");
  expect_row_refused(bounds + "kernel=ring rows_per_stage=2 ctas_per_sm=1 cluster_size=2",
                     "cluster_size: expected none with kernel=ring, got one");
  expect_row_refused(bounds + "kernel=cluster cluster_size=2 ctas_per_sm=1",
                     "ctas_per_sm: expected none with kernel=cluster, got one");
  for (const char* wrong : {"9", "9.", ".0", "9.0.0", "nine", "-9.0", "9.10", ""}) {
    expect_refused(
        kHeader + "device num_sms=132 compute_capability=" + wrong + "\n" + kLast, 2,
        std::string("compute_capability: expected a number such as 9.0, got '") + wrong + "'");
  }
  expect_refused(kHeader + "device compute_capability=9.0 num_sms=0\n" + kLast, 2,
                 "num_sms: expected a number from 1 to 65536, got '0'");
  expect_row_refused(
      "row reads=" + std::string(1000, 'x') + rest,
      "reads: expected any, early or after_wait, got '" + std::string(40, 'x') + "...'");
}

TEST_CASE(kernels_that_are_not_compiled_are_refused) {
  const std::string bounds = "row reads=any max_sources=9 max_entries=8 ";
  expect_row_refused(bounds + "kernel=cluster cluster_size=8",
                     "expected a kernel that is compiled for 1 sources, got kernel=cluster "
                     "cluster_size=8");
  expect_row_refused(bounds + "kernel=ring rows_per_stage=4 ctas_per_sm=1",
                     "expected a kernel that is compiled for 1 sources, got kernel=ring "
                     "rows_per_stage=4");
  expect_row_refused(bounds + "kernel=ring rows_per_stage=3 ctas_per_sm=2",
                     "ctas_per_sm: expected at most 1 with 1 sources, got 2");
}

TEST_CASE(a_device_must_be_served_to_the_end) {
  const std::string what =
      "device: expected a last row for every call (reads=any max_sources=9 max_entries=unlimited "
      "kernel=ring), got none";
  expect_refused(kHeader + kDevice, 2, what);
  for (const char* last :
       {"reads=any max_sources=9 max_entries=9999 kernel=ring rows_per_stage=2 ctas_per_sm=2",
        "reads=any max_sources=8 max_entries=unlimited kernel=ring rows_per_stage=2 ctas_per_sm=2",
        "reads=early max_sources=9 max_entries=unlimited kernel=ring rows_per_stage=2 "
        "ctas_per_sm=2",
        "reads=any max_sources=9 max_entries=unlimited kernel=cluster cluster_size=2"}) {
    expect_refused(kHeader + kDevice + kLast + "row " + last + "\n", 2, what);
    expect_refused(
        kHeader + kDevice + "row " + last + "\ndevice compute_capability=9.0 num_sms=1\n" + kLast,
        2, what);
  }
}

TEST_CASE(what_is_not_text_is_refused) {
  expect_refused(kHeader + std::string("row\0", 4), 2, "expected ASCII text, got the byte 0x00");
  expect_refused("\xef\xbb\xbf" + kHeader, 1, "expected ASCII text, got the byte 0xef");
  expect_refused(kHeader + "\x1b[2J", 2, "expected ASCII text, got the byte 0x1b");
}

TEST_CASE(size_is_limited) {
  std::string rows;
  for (int i = 0; i < 257; ++i) rows += kLast;
  expect_refused(kHeader + kDevice + rows, 259, "expected at most 256 rows for a device, got more");
  expect_refused(std::string(65537, '\n'), 0, "expected at most 65536 bytes, got more");
}

TEST_CASE(files_that_cannot_be_read_are_named) {
  Folder folder;
  const std::string good = folder.write("good.txt", kHeader + kDevice + kLast);
  EXPECT_EQ(read_error(good), "accepted");
  const std::string missing = folder.path() + "/missing.txt";
  EXPECT_EQ(read_error(missing),
            "LIBATTNRES_PLAN_FILE: " + missing + ": No such file or directory");
  EXPECT_EQ(read_error(folder.path()), "LIBATTNRES_PLAN_FILE: " + folder.path() +
                                           ": expected a regular file, got a directory");
  const std::string pipe = folder.name("pipe");
  EXPECT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(read_error(pipe),
            "LIBATTNRES_PLAN_FILE: " + pipe + ": expected a regular file, got something else");
  EXPECT_EQ(read_error("/dev/zero"),
            "LIBATTNRES_PLAN_FILE: /dev/zero: expected a regular file, got something else");
  const std::string huge = folder.write("huge.txt", "");
  EXPECT_EQ(truncate(huge.c_str(), off_t{1} << 40), 0);  // sparse
  EXPECT_EQ(read_error(huge),
            "LIBATTNRES_PLAN_FILE: " + huge + ": expected at most 65536 bytes, got more");
  if (geteuid() != 0) {
    const std::string secret = folder.write("secret.txt", kHeader + kDevice + kLast);
    EXPECT_EQ(chmod(secret.c_str(), 0), 0);
    EXPECT_EQ(read_error(secret), "LIBATTNRES_PLAN_FILE: " + secret + ": Permission denied");
  }
}

TEST_CASE(paths_in_messages_are_short_and_printable) {
  EXPECT_EQ(printable_path("a\nb\xff.txt"), "a?b?.txt");
  EXPECT_EQ(printable_path(std::string(300, 'a') + "z"), "..." + std::string(199, 'a') + "z");
}

TEST_CASE(damaged_files_are_refused_or_served_but_never_worse) {
  const std::string good =
      kHeader + kDevice +
      "row reads=after_wait max_sources=9 max_entries=8 kernel=cluster cluster_size=4\n" + kLast;
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string text = good;
    const int damages = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < damages; ++i) {
      if (text.empty()) break;
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + random() % 20);
          break;
        case 2:
          text.insert(at, text.substr(random() % text.size(), random() % 30));
          break;
        default:
          text.resize(at + 1);
      }
    }
    const std::string message = error_of(text);
    if (message == "accepted") continue;
    EXPECT_EQ(message.rfind("LIBATTNRES_PLAN_FILE: p.txt", 0), size_t{0});
    EXPECT(message.size() < 512);
  }
}
