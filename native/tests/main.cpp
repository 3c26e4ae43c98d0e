#include <chrono>
#include <cstdio>
#include <string_view>

#include "tests/check.h"

// Runs all tests, or those whose names contain `part`; returns 1 if one failed, 2 if there was
// none. The tests of the client are a library, which Python loads as it loads the client.
extern "C" int sing_run_tests(const char* part) {
  const std::string_view wanted = part;
  int ran = 0, failed = 0;
  for (const auto& test : sing::test::cases()) {
    if (std::string_view(test.name).find(wanted) == std::string_view::npos) continue;
    ++ran;
    const auto began = std::chrono::steady_clock::now();
    std::string failure;
    try {
      test.body();
    } catch (const std::exception& error) {
      failure = error.what();
      ++failed;
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("%s  %s (%.2f s)\n", failure.empty() ? "ok  " : "FAIL", test.name, took.count());
    if (!failure.empty()) std::printf("      %s\n", failure.c_str());
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed\n", ran, failed);
  return failed != 0 ? 1 : ran == 0 ? 2 : 0;
}

int main(int argc, char** argv) { return sing_run_tests(argc > 1 ? argv[1] : ""); }
