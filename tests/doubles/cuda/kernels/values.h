// Types of elements and how the double computes with them: floating point in double, which is exact
// enough to round once, and integers in 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sing_double {

// In the order of torch's ScalarType.
enum class Type : int8_t { u8, i8, i16, i32, i64, f16, f32, f64, b8 = 11, bf16 = 15, none = -1 };

size_t size_of(Type type);
bool is_floating(Type type);
// The type that C++ names so, as in a kernel's readable name; `none` for others.
Type type_named(const std::string& name);

struct Value {
  double real = 0;
  int64_t whole = 0;
  bool floating = false;
};

Value load(Type type, const char* from);
// Converts like a cast in C++, and stores.
void store(Type type, char* to, const Value& value);
Value converted(const Value& value, Type type);

}  // namespace sing_double
