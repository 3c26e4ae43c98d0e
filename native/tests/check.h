// A minimal test runner: no library has to be installed to test what is built anywhere.
#pragma once

#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace sing::test {

struct Case {
  const char* name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> body) { cases().push_back({name, body}); }
};

// True in `make test-all`.
inline bool exhaustive() { return std::getenv("EXHAUSTIVE") != nullptr; }

class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else {
    out << "(a value)";
  }
  return out.str();
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw CheckFailed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

}  // namespace sing::test

#define TEST(name)                                                       \
  static void test_##name();                                             \
  static const sing::test::Register register_##name(#name, test_##name); \
  static void test_##name()

#define EXPECT(condition) \
  ((condition) ? void() : sing::test::fail(__FILE__, __LINE__, "not so: " #condition))

#define EXPECT_EQ(left, right)                                                       \
  do {                                                                               \
    const auto left_value = (left);                                                  \
    const auto right_value = (right);                                                \
    if (!(left_value == right_value)) {                                              \
      sing::test::fail(__FILE__, __LINE__,                                           \
                       #left " is " + sing::test::show(left_value) + ", expected " + \
                           sing::test::show(right_value));                           \
    }                                                                                \
  } while (false)

#define EXPECT_THROWS(type, expression)                                                 \
  do {                                                                                  \
    bool thrown = false;                                                                \
    try {                                                                               \
      (void)(expression);                                                               \
    } catch (const type&) {                                                             \
      thrown = true;                                                                    \
    }                                                                                   \
    if (!thrown) sing::test::fail(__FILE__, __LINE__, #expression " throws no " #type); \
  } while (false)
