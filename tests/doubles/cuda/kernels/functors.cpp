#include "kernels/functors.h"

#include <cmath>
#include <map>
#include <regex>

namespace sing_double {
namespace {

using Unary = Value (*)(const Value&);
using Binary = Value (*)(const Value&, const Value&);

Value real(double value) { return {value, 0, true}; }
Value whole(int64_t value) { return {0, value, false}; }

Value add(const Value& a, const Value& b) {
  return a.floating ? real(a.real + b.real) : whole(a.whole + b.whole);
}

Value multiply(const Value& a, const Value& b) {
  return a.floating ? real(a.real * b.real) : whole(a.whole * b.whole);
}

Value divide(const Value& a, const Value& b) { return real(a.real / b.real); }

Value equal(const Value& a, const Value& b) {
  return whole(a.floating ? a.real == b.real : a.whole == b.whole);
}

Value negative(const Value& a) { return a.floating ? real(-a.real) : whole(-a.whole); }
Value absolute(const Value& a) {
  return a.floating ? real(std::fabs(a.real)) : whole(std::abs(a.whole));
}
Value square_root(const Value& a) { return real(std::sqrt(a.real)); }
Value same(const Value& a) { return a; }

const std::map<std::string, Binary>& binaries() {
  static const auto* all = new std::map<std::string, Binary>{
      {"MulFunctor", multiply}, {"DivFunctor", divide}, {"CompareEqFunctor", equal}};
  return *all;
}

// Kernels whose functor is a lambda of one element, by the name of the function around it.
const std::map<std::string, Unary>& lambdas() {
  static const auto* all = new std::map<std::string, Unary>{{"direct_copy_kernel_cuda", same},
                                                            {"neg_kernel_cuda", negative},
                                                            {"sqrt_kernel_cuda", square_root}};
  return *all;
}

// The type of parameters in a functor: half precision is computed in single.
Type parameter_of(Type type) { return type == Type::f16 || type == Type::bf16 ? Type::f32 : type; }

size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// FillFunctor<T>: one value.
Functor fill(Type type) {
  return {type, {}, size_of(type), [type](const char* functor) {
            const Value value = load(type, functor);
            return [value](const Value*) { return value; };
          }};
}

// CUDAFunctor_add and its kinds: a + alpha * b, where one of them may be a parameter.
Functor addition(const std::string& kind, Type type) {
  const Type parameter = parameter_of(type);
  const size_t size = size_of(parameter);
  if (kind.empty()) {
    return {type, {type, type}, size, [=](const char* functor) {
              const Value alpha = load(parameter, functor);
              return [alpha](const Value* in) { return add(in[0], multiply(alpha, in[1])); };
            }};
  }
  const bool on_self = kind == "OnSelf";
  return {type, {type}, 2 * size, [=](const char* functor) {
            const Value other = load(parameter, functor), alpha = load(parameter, functor + size);
            return [=](const Value* in) {
              return on_self ? add(in[0], multiply(alpha, other))
                             : add(other, multiply(alpha, in[0]));
            };
          }};
}

// BinaryFunctor, and AUnaryFunctor and BUnaryFunctor, which hold one operand behind the functor of
// two. That is empty, or begins with a mode: of CompareEqFunctor, 1 means "not equal".
Functor binary(const std::string& kind, Type type, Type out, const std::string& name, Type held) {
  const Binary function = binaries().at(name);
  const bool compares = name == "CompareEqFunctor";
  const size_t size = size_of(held), held_at = rounded_up(compares ? sizeof(int) : 1, size);
  const auto applied = [=](const char* functor) {
    const bool opposite = compares && functor[0];
    return [=](const Value& a, const Value& b) {
      const Value found = function(a, b);
      return opposite ? whole(!found.whole) : found;
    };
  };
  if (kind == "Binary") {
    return {out, {type, type}, compares ? sizeof(int) : 1, [=](const char* functor) {
              const auto apply = applied(functor);
              return [=](const Value* in) { return apply(in[0], in[1]); };
            }};
  }
  const bool first = kind == "AUnary";
  return {out, {type}, held_at + size, [=](const char* functor) {
            const Value other = load(held, functor + held_at);
            const auto apply = applied(functor);
            return
                [=](const Value* in) { return first ? apply(other, in[0]) : apply(in[0], other); };
          }};
}

Functor unary(Type in, Type out, Unary function) {
  return {out, {in}, 1, [=](const char*) {
            return [=](const Value* each) { return function(each[0]); };
          }};
}

}  // namespace

Functor functor_named(const std::string& name) {
  static const auto* kFill = new std::regex("^at::native::FillFunctor<([\\w: ]+)>$");
  static const auto* kAdd =
      new std::regex("^at::native::CUDAFunctor(|OnSelf|OnOther)_add<([\\w: ]+)>$");
  static const auto* kBinary = new std::regex(
      "^at::native::(Binary|AUnary|BUnary)Functor<([\\w: ]+), [\\w: ]+, ([\\w: ]+), "
      ".*::(\\w+Functor)<([\\w: ]+)> >$");
  static const auto* kAbsolute = new std::regex("^at::native::AbsFunctor<([\\w: ]+)>$");
  static const auto* kHalf =
      new std::regex("^at::native::(b?)float16_copy_kernel_cuda\\(.*lambda\\(float\\)#1\\}$");
  static const auto* kLambda = new std::regex(
      "^at::native::(?:\\(anonymous namespace\\)::)?(\\w+)\\(.*"
      "\\{lambda\\(([\\w: ]+)\\)#\\d+\\}$");
  std::smatch found;
  if (std::regex_match(name, found, *kFill)) return fill(type_named(found[1]));
  if (std::regex_match(name, found, *kAdd)) return addition(found[1], type_named(found[2]));
  if (std::regex_match(name, found, *kBinary) && binaries().count(found[4])) {
    return binary(found[1], type_named(found[2]), type_named(found[3]), found[4],
                  type_named(found[5]));
  }
  if (std::regex_match(name, found, *kAbsolute)) {
    return unary(type_named(found[1]), type_named(found[1]), absolute);
  }
  if (std::regex_match(name, found, *kHalf)) {
    return unary(Type::f32, found[1].length() ? Type::bf16 : Type::f16, same);
  }
  if (std::regex_match(name, found, *kLambda) && lambdas().count(found[1])) {
    return unary(type_named(found[2]), type_named(found[2]), lambdas().at(found[1]));
  }
  return {};
}

}  // namespace sing_double
