// SPDX-License-Identifier: Apache-2.0
#include "plan_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>
#include <system_error>
#include <utility>

#include "error.hpp"

namespace attnres {
namespace {

constexpr size_t kMaxFileBytes = 65536;
constexpr size_t kMaxRowsPerDevice = 256;
constexpr int kMaxSms = 65536;
constexpr std::string_view kHeader = "libattnres-plan 1";
constexpr std::string_view kBlanks = " \t";

[[noreturn]] void fail_file(const std::string& path, const std::string& what) {
  fail(ATTNRES_INVALID_ARGUMENT,
       std::string(kPlanFileVariable) + ": " + printable_path(path) + what);
}

[[noreturn]] void fail_errno(const std::string& path, int code) {
  fail_file(path, ": " + std::generic_category().message(code));
}

// A word of the file for a message.
std::string quoted(std::string_view word) {
  constexpr size_t kMaxShown = 40;
  std::string text(1, '\'');
  text += printable(word.substr(0, kMaxShown));
  text += word.size() > kMaxShown ? "...'" : "'";
  return text;
}

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

// One line, taken apart from the left.
class Line {
 public:
  Line(const std::string& path, int number, std::string_view text)
      : path_(path), number_(number), rest_(trimmed(text)) {}

  int number() const { return number_; }
  bool empty() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }

  [[noreturn]] void refuse(const std::string& what) const {
    fail_file(path_, ", line " + std::to_string(number_) + ": " + what);
  }
  [[noreturn]] void refuse(std::string_view name, const std::string& expected,
                           std::string_view got) const {
    refuse(std::string(name) + ": expected " + expected + ", got " + quoted(got));
  }

  std::string_view word() {
    const std::string_view word = rest_.substr(0, rest_.find_first_of(kBlanks));
    rest_ = trimmed(rest_.substr(word.size()));
    return word;
  }
  std::string_view everything() {
    const std::string_view all = rest_;
    rest_ = {};
    return all;
  }

  int number_of(std::string_view key, std::string_view text, int low, int high) const {
    const std::optional<int> number = to_number(text);
    if (!number || *number < low || *number > high) {
      refuse(key, "a number from " + std::to_string(low) + " to " + std::to_string(high), text);
    }
    return *number;
  }

  static std::optional<int> to_number(std::string_view text) {
    int number = 0;
    const char* begin = text.data();
    const char* end = begin + text.size();
    const auto [parsed, error] = std::from_chars(begin, end, number);
    if (error != std::errc() || parsed != end) return std::nullopt;
    return number;
  }

 private:
  const std::string& path_;
  int number_;
  std::string_view rest_;
};

// The `key=value` words of a line, each key at most once and every one of them known.
template <size_t SIZE>
class Values {
 public:
  // `last` takes the rest of the line, blanks included.
  Values(Line& line, const std::string_view (&keys)[SIZE], std::string_view last = {})
      : line_(line), keys_(keys) {
    while (!line.empty()) {
      const size_t key_size = line.rest().find_first_of("= \t");
      if (key_size == std::string_view::npos || line.rest()[key_size] != '=') {
        line.refuse("expected key=value, got " + quoted(line.word()));
      }
      const std::string_view key = line.rest().substr(0, key_size);
      std::string_view value = key == last ? line.everything() : line.word();
      value.remove_prefix(key_size + 1);
      *slot(key) = value;
    }
  }

  std::optional<std::string_view> optional(std::string_view key) const {
    for (size_t i = 0; i < SIZE; ++i) {
      if (keys_[i] == key) return values_[i];
    }
    return std::nullopt;
  }
  std::string_view required(std::string_view key) const {
    const std::optional<std::string_view> value = optional(key);
    if (!value) line_.refuse(std::string(key) + ": expected a value, got none");
    return *value;
  }
  void refuse_present(std::string_view key, const std::string& why) const {
    if (optional(key)) line_.refuse(std::string(key) + ": " + why);
  }

 private:
  std::optional<std::string_view>* slot(std::string_view key) {
    std::string known;
    for (size_t i = 0; i < SIZE; ++i) {
      if (keys_[i] == key) {
        if (values_[i]) line_.refuse(std::string(key) + ": expected once, got it twice");
        return &values_[i];
      }
      known += (known.empty() ? "" : ", ") + std::string(keys_[i]);
    }
    line_.refuse("expected a key among " + known + ", got " + quoted(key));
  }

  const Line& line_;
  const std::string_view (&keys_)[SIZE];
  std::optional<std::string_view> values_[SIZE];
};

constexpr std::string_view kDeviceKeys[] = {"compute_capability", "num_sms", "name"};
constexpr std::string_view kRowKeys[] = {"reads",          "max_sources",    "max_entries",
                                         "kernel",         "rows_per_stage", "ctas_per_sm",
                                         "rows_in_flight", "cluster_size"};

PlanSection parse_device(Line& line) {
  const Values values(line, kDeviceKeys, "name");
  const std::string_view capability = values.required("compute_capability");
  const size_t dot = capability.find('.');
  const std::optional<int> major = Line::to_number(capability.substr(0, dot));
  const std::optional<int> minor =
      dot == std::string_view::npos ? std::nullopt : Line::to_number(capability.substr(dot + 1));
  if (!major || !minor || *major < 1 || *major > 99 || *minor < 0 || *minor > 9) {
    line.refuse("compute_capability", "a number such as 9.0", capability);
  }
  const int num_sms = line.number_of("num_sms", values.required("num_sms"), 1, kMaxSms);
  const std::string_view name = values.optional("name").value_or("");
  return {*major, *minor, num_sms, std::string(name), line.number(), {}};
}

PlanRow parse_row(Line& line, int num_sms, const MaxCtasPerSm& max_ctas_per_sm) {
  const Values values(line, kRowKeys);
  PlanRow row{};
  const std::string_view reads = values.required("reads");
  if (reads == "any") {
    row.reads = Reads::kAny;
  } else if (reads == "early") {
    row.reads = Reads::kEarly;
  } else if (reads == "after_wait") {
    row.reads = Reads::kAfterWait;
  } else {
    line.refuse("reads", "any, early or after_wait", reads);
  }
  row.max_sources = line.number_of("max_sources", values.required("max_sources"), 1, kMaxSources);
  const std::string_view max_entries = values.required("max_entries");
  if (max_entries == "unlimited") {
    row.max_entries_per_sm = kUnbounded;
  } else {
    const std::optional<int> number = Line::to_number(max_entries);
    if (!number || *number < 1)
      line.refuse("max_entries", "a number >= 1 or unlimited", max_entries);
    row.max_entries_per_sm = static_cast<double>(*number) / num_sms;
  }
  const std::string_view kernel = values.required("kernel");
  if (kernel == "ring") {
    row.kernel = ATTNRES_KERNEL_RING;
    row.rows_per_stage =
        line.number_of("rows_per_stage", values.required("rows_per_stage"), 1, kMaxSources);
    row.ctas_per_sm = line.number_of("ctas_per_sm", values.required("ctas_per_sm"), 1, 32);
    if (const std::optional<std::string_view> rows = values.optional("rows_in_flight")) {
      row.rows_in_flight = line.number_of("rows_in_flight", *rows,
                                          std::max(2, row.rows_per_stage) * row.ctas_per_sm, 1024);
    }
    values.refuse_present("cluster_size", "expected none with kernel=ring, got one");
  } else if (kernel == "cluster") {
    row.kernel = ATTNRES_KERNEL_CLUSTER;
    row.cluster_size = line.number_of("cluster_size", values.required("cluster_size"), 1, 16);
    values.refuse_present("rows_per_stage", "expected none with kernel=cluster, got one");
    values.refuse_present("ctas_per_sm", "expected none with kernel=cluster, got one");
    values.refuse_present("rows_in_flight", "expected none with kernel=cluster, got one");
  } else {
    line.refuse("kernel", "ring or cluster", kernel);
  }
  for (int num_sources = 1; num_sources <= row.max_sources; ++num_sources) {
    const int max_ctas =
        max_ctas_per_sm(row.kernel, num_sources, row.rows_per_stage, row.cluster_size);
    if (max_ctas == 0) {
      line.refuse("expected a kernel that is compiled for " + std::to_string(num_sources) +
                  " sources, got kernel=" + std::string(kernel) +
                  (row.kernel == ATTNRES_KERNEL_RING
                       ? " rows_per_stage=" + std::to_string(row.rows_per_stage)
                       : " cluster_size=" + std::to_string(row.cluster_size)));
    }
    if (row.ctas_per_sm > max_ctas) {
      line.refuse("ctas_per_sm: expected at most " + std::to_string(max_ctas) + " with " +
                  std::to_string(num_sources) + " sources, got " + std::to_string(row.ctas_per_sm));
    }
  }
  return row;
}

void require_complete(const std::string& path, const PlanSection& section) {
  const PlanRow* last = section.rows.empty() ? nullptr : &section.rows.back();
  if (last == nullptr || last->reads != Reads::kAny || last->max_sources != kMaxSources ||
      last->max_entries_per_sm != kUnbounded || last->kernel != ATTNRES_KERNEL_RING) {
    fail_file(path, ", line " + std::to_string(section.line) +
                        ": device: expected a last row for every call (reads=any max_sources=" +
                        std::to_string(kMaxSources) +
                        " max_entries=unlimited kernel=ring), got none");
  }
}

void require_text(const std::string& path, std::string_view text) {
  int line = 1;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == '\n') ++line;
    if ((byte >= 0x20 && byte < 0x7f) || byte == '\n' || byte == '\t' || byte == '\r') continue;
    constexpr char kDigits[] = "0123456789abcdef";
    fail_file(path, ", line " + std::to_string(line) + ": expected ASCII text, got the byte 0x" +
                        kDigits[byte >> 4] + kDigits[byte & 15]);
  }
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int descriptor) : descriptor_(descriptor) {}
  ~FileDescriptor() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace

PlanFile parse_plan_file(const std::string& path, std::string_view text,
                         const MaxCtasPerSm& max_ctas_per_sm) {
  if (text.size() > kMaxFileBytes) {
    fail_file(path, ": expected at most " + std::to_string(kMaxFileBytes) + " bytes, got more");
  }
  require_text(path, text);
  PlanFile file;
  bool has_header = false;
  for (int number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view content = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!content.empty() && content.back() == '\r') content.remove_suffix(1);
    Line line(path, number, content);
    if (line.empty() || line.rest().front() == '#') continue;
    if (!has_header) {
      if (line.rest() != kHeader) {
        line.refuse("expected " + quoted(kHeader) + " first, got " + quoted(line.rest()));
      }
      has_header = true;
      continue;
    }
    const std::string_view kind = line.word();
    if (kind == "device") {
      if (!file.empty()) require_complete(path, file.back());
      PlanSection section = parse_device(line);
      for (const PlanSection& other : file) {
        if (other.compute_major == section.compute_major &&
            other.compute_minor == section.compute_minor && other.num_sms == section.num_sms &&
            other.device_name == section.device_name) {
          line.refuse("device: expected each once, got the one of line " +
                      std::to_string(other.line) + " again");
        }
      }
      file.push_back(std::move(section));
    } else if (kind == "row") {
      if (file.empty()) line.refuse("expected a device line before the first row, got a row");
      PlanSection& section = file.back();
      if (section.rows.size() == kMaxRowsPerDevice) {
        line.refuse("expected at most " + std::to_string(kMaxRowsPerDevice) +
                    " rows for a device, got more");
      }
      section.rows.push_back(parse_row(line, section.num_sms, max_ctas_per_sm));
    } else {
      line.refuse("expected a line that starts with device, row or #, got " + quoted(kind));
    }
  }
  if (file.empty()) {
    fail_file(path, has_header ? ": expected a device line, got none"
                               : ": expected " + quoted(kHeader) + ", got an empty file");
  }
  require_complete(path, file.back());
  return file;
}

PlanFile read_plan_file(const std::string& path, const MaxCtasPerSm& max_ctas_per_sm) {
  // A pipe without a writer must not block the process.
  const FileDescriptor descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (descriptor.get() < 0) fail_errno(path, errno);
  struct stat status{};
  if (fstat(descriptor.get(), &status) != 0) fail_errno(path, errno);
  if (!S_ISREG(status.st_mode)) {
    fail_file(path, std::string(": expected a regular file, got ") +
                        (S_ISDIR(status.st_mode) ? "a directory" : "something else"));
  }
  // One byte more than is allowed tells that there is more.
  std::string text(kMaxFileBytes + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t count = read(descriptor.get(), text.data() + size, text.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_errno(path, errno);
    if (count == 0) break;
    size += static_cast<size_t>(count);
  }
  text.resize(size);
  return parse_plan_file(path, text, max_ctas_per_sm);
}

const PlanSection* find_section(const PlanFile& file, int compute_major, int compute_minor,
                                int num_sms, const char* device_name) {
  const PlanSection* unnamed = nullptr;
  for (const PlanSection& section : file) {
    if (section.compute_major != compute_major || section.compute_minor != compute_minor ||
        section.num_sms != num_sms) {
      continue;
    }
    if (device_name == nullptr || section.device_name == device_name) return &section;
    if (section.device_name.empty()) unnamed = &section;
  }
  return unnamed;
}

std::string printable_path(std::string_view path) {
  constexpr size_t kMaxShown = 200;
  std::string shown;
  if (path.size() > kMaxShown) {
    shown = "...";
    path.remove_prefix(path.size() - kMaxShown);
  }
  return shown + printable(path);
}

}  // namespace attnres
