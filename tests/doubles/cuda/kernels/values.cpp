#include "kernels/values.h"

#include <string.h>

#include <cmath>

namespace sing_double {
namespace {

// Half precision: 1 sign, 5 exponent and 10 fraction bits; bfloat16: the first half of a float.
float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits >> 15 ? -1.f : 1.f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (!exponent) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

uint16_t to_half(float value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) << 15);
  const float size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520.f) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(size, &exponent);
  const int scale = std::max(exponent - 11, -24);  // of the last bit
  const auto rounded = static_cast<unsigned>(std::nearbyint(std::ldexp(size, -scale)));
  if (!rounded) return sign;
  if (rounded < 1024) return static_cast<uint16_t>(sign | rounded);
  return static_cast<uint16_t>(sign | (((scale + 24) << 10) + rounded));
}

float from_bfloat(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t to_bfloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename Element>
Element read(const char* from) {
  Element element;
  memcpy(&element, from, sizeof element);
  return element;
}

template <typename Element>
void write(char* to, Element element) {
  memcpy(to, &element, sizeof element);
}

Value real(double value) { return {value, 0, true}; }
Value whole(int64_t value) { return {0, value, false}; }

}  // namespace

size_t size_of(Type type) {
  switch (type) {
    case Type::u8:
    case Type::i8:
    case Type::b8:
      return 1;
    case Type::i16:
    case Type::f16:
    case Type::bf16:
      return 2;
    case Type::i32:
    case Type::f32:
      return 4;
    case Type::i64:
    case Type::f64:
      return 8;
    case Type::none:
      break;
  }
  return 0;
}

bool is_floating(Type type) {
  return type == Type::f16 || type == Type::bf16 || type == Type::f32 || type == Type::f64;
}

Type type_named(const std::string& name) {
  if (name == "float") return Type::f32;
  if (name == "double") return Type::f64;
  if (name == "long") return Type::i64;
  if (name == "int") return Type::i32;
  if (name == "short") return Type::i16;
  if (name == "signed char") return Type::i8;
  if (name == "unsigned char") return Type::u8;
  if (name == "bool") return Type::b8;
  if (name == "c10::Half") return Type::f16;
  if (name == "c10::BFloat16") return Type::bf16;
  return Type::none;
}

Value load(Type type, const char* from) {
  switch (type) {
    case Type::u8:
      return whole(read<uint8_t>(from));
    case Type::i8:
      return whole(read<int8_t>(from));
    case Type::b8:
      return whole(read<uint8_t>(from) != 0);
    case Type::i16:
      return whole(read<int16_t>(from));
    case Type::i32:
      return whole(read<int32_t>(from));
    case Type::i64:
      return whole(read<int64_t>(from));
    case Type::f16:
      return real(from_half(read<uint16_t>(from)));
    case Type::bf16:
      return real(from_bfloat(read<uint16_t>(from)));
    case Type::f32:
      return real(read<float>(from));
    case Type::f64:
      return real(read<double>(from));
    case Type::none:
      break;
  }
  return {};
}

Value converted(const Value& value, Type type) {
  if (type == Type::b8) return whole(value.floating ? value.real != 0 : value.whole != 0);
  if (value.floating == is_floating(type)) return value;
  if (value.floating) return whole(static_cast<int64_t>(value.real));
  return real(static_cast<double>(value.whole));
}

void store(Type type, char* to, const Value& given) {
  const Value value = converted(given, type);
  switch (type) {
    case Type::u8:
    case Type::i8:
    case Type::b8:
      return write(to, static_cast<uint8_t>(value.whole));
    case Type::i16:
      return write(to, static_cast<int16_t>(value.whole));
    case Type::i32:
      return write(to, static_cast<int32_t>(value.whole));
    case Type::i64:
      return write(to, value.whole);
    case Type::f16:
      return write(to, to_half(static_cast<float>(value.real)));
    case Type::bf16:
      return write(to, to_bfloat(static_cast<float>(value.real)));
    case Type::f32:
      return write(to, static_cast<float>(value.real));
    case Type::f64:
      return write(to, value.real);
    case Type::none:
      break;
  }
}

}  // namespace sing_double
