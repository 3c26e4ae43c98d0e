#include "sandbox/options.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string_view>

namespace sing::sandbox {
namespace {

[[noreturn]] void refuse(const char* why, const char* what) {
  std::fprintf(stderr,
               "sing-sandbox: %s %s\n"
               "usage: sing-sandbox start [--user] --report FD [--lifeline FD] -- COMMAND...\n"
               "       sing-sandbox restore [--user] --report FD [--lifeline FD] --main-pid PID\n"
               "         --last-pid PID [--monotonic NS --boottime NS] -- COMMAND...\n"
               "       sing-sandbox enter [--user] --target PID -- COMMAND...\n",
               why, what);
  std::exit(2);
}

int64_t number(const char* text, int64_t most) {
  int64_t value = -1;
  const char* end = text + std::strlen(text);
  const auto [stopped, error] = std::from_chars(text, end, value);
  if (error != std::errc() || stopped != end || value < 0 || value > most) {
    refuse("no number that it could be:", text);
  }
  return value;
}

}  // namespace

Options parse(int count, char** arguments) {
  Options options;
  const std::string_view mode = count > 1 ? arguments[1] : "";
  if (mode == "restore") {
    options.mode = Mode::kRestore;
  } else if (mode == "enter") {
    options.mode = Mode::kEnter;
  } else if (mode != "start") {
    refuse("unknown mode:", count > 1 ? arguments[1] : "none");
  }
  constexpr int kMost = std::numeric_limits<int>::max();
  constexpr int64_t kLong = std::numeric_limits<int64_t>::max();
  int at = 2;
  for (; at < count; ++at) {
    const std::string_view name = arguments[at];
    if (name == "--") break;
    if (name == "--user") {
      options.user = true;
      continue;
    }
    if (name == "--root") {
      options.root = true;
      continue;
    }
    const char* value = at + 1 < count ? arguments[at + 1] : "";
    if (name == "--report") {
      options.report = static_cast<int>(number(value, kMost));
    } else if (name == "--lifeline") {
      options.lifeline = static_cast<int>(number(value, kMost));
    } else if (name == "--main-pid") {
      options.main_pid = static_cast<pid_t>(number(value, kMost));
    } else if (name == "--last-pid") {
      options.last_pid = static_cast<pid_t>(number(value, kMost));
    } else if (name == "--target") {
      options.target = static_cast<pid_t>(number(value, kMost));
    } else if (name == "--monotonic") {
      options.monotonic = number(value, kLong);
    } else if (name == "--boottime") {
      options.boottime = number(value, kLong);
    } else {
      refuse("unknown option:", arguments[at]);
    }
    ++at;
  }
  if (at + 1 >= count) refuse("no command", "");
  options.command = arguments + at + 1;
  if (options.mode == Mode::kEnter) {
    if (options.target < 1) refuse("missing:", "--target");
  } else if (options.report < 0) {
    refuse("missing:", "--report");
  }
  if (options.mode == Mode::kRestore && (options.main_pid < 2 || options.last_pid < 2)) {
    refuse("missing:", "--main-pid, --last-pid");
  }
  return options;
}

}  // namespace sing::sandbox
