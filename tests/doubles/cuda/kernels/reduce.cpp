#include "kernels/reduce.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <regex>

#include "device/memory.h"
#include "kernels/offsets.h"
#include "kernels/values.h"

namespace sing_double {
namespace {

constexpr int kIllegalAddress = 700;
constexpr size_t kConfig =
    16 * sizeof(int);  // ReduceConfig: inputs and outputs are its second and third
constexpr size_t kInputs = 1, kOutputs = 2;
constexpr size_t kPointer = 8, kAccumulateAt = 7 * kPointer;

enum class Kind { sum, mean, largest, smallest, all, any };

struct Reduction {
  Kind kind;
  Type in, computed, out;
};

Value combined(Kind kind, const Value& a, const Value& b) {
  switch (kind) {
    case Kind::sum:
    case Kind::mean:
      return {a.real + b.real, a.whole + b.whole, a.floating};
    case Kind::largest:
      if (std::isnan(a.real) || std::isnan(b.real)) return std::isnan(a.real) ? a : b;
      return {std::max(a.real, b.real), std::max(a.whole, b.whole), a.floating};
    case Kind::smallest:
      if (std::isnan(a.real) || std::isnan(b.real)) return std::isnan(a.real) ? a : b;
      return {std::min(a.real, b.real), std::min(a.whole, b.whole), a.floating};
    case Kind::all:
      return {0, a.whole && b.whole, false};
    case Kind::any:
      return {0, a.whole || b.whole, false};
  }
  return a;
}

size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

int count_at(const char* config, size_t index) {
  int count;
  memcpy(&count, config + index * sizeof(int), sizeof count);
  return count;
}

// ReduceOp: functor, identity, configuration, offsets of inputs, offsets of outputs, pointers.
Work prepared(const Reduction& reduction, void** arguments) {
  const char* op = static_cast<char*>(arguments[0]);
  const size_t size = size_of(reduction.computed);
  const Value factor = reduction.kind == Kind::mean ? load(reduction.computed, op) : Value{};
  const size_t identity_at = reduction.kind == Kind::mean ? size : rounded_up(1, size);
  const Value identity = load(reduction.computed, op + identity_at);
  const size_t config_at = rounded_up(identity_at + size, sizeof(int));
  const size_t inputs_at = config_at + kConfig, outputs_at = inputs_at + Offsets::bytes(1);
  const size_t pointers_at = rounded_up(outputs_at + Offsets::bytes(2), kPointer);
  if (op[pointers_at + kAccumulateAt]) return nullptr;  // of one that was split
  const int inputs = count_at(op + config_at, kInputs),
            outputs = count_at(op + config_at, kOutputs);
  const Offsets in = Offsets::read(op + inputs_at, 1), out = Offsets::read(op + outputs_at, 2);
  const char* from = nullptr;
  char* to = nullptr;
  memcpy(&from, op + pointers_at, kPointer);
  memcpy(&to, op + pointers_at + kPointer, kPointer);
  return [=] {
    const uint64_t beyond = out.extent(1, 0);
    const char* source = memory::bytes_at(from, beyond + in.extent(0, size_of(reduction.in)));
    char* target = memory::bytes_at(to, out.extent(0, size_of(reduction.out)));
    if (!source || !target) return kIllegalAddress;
    for (int output = 0; output < outputs; ++output) {
      const char* start = source + out.at(static_cast<uint64_t>(output), 1);
      Value sum = identity;
      for (int input = 0; input < inputs; ++input) {
        const char* at = start + in.at(static_cast<uint64_t>(input), 0);
        sum = combined(reduction.kind, sum, converted(load(reduction.in, at), reduction.computed));
      }
      if (reduction.kind == Kind::mean) sum.real *= factor.real;
      store(reduction.out, target + out.at(static_cast<uint64_t>(output), 0), sum);
    }
    return 0;
  };
}

}  // namespace

Prepare reduction_named(const std::string& name) {
  static const auto* kName = new std::regex(
      "^void at::native::reduce_kernel<\\d+, \\d+, at::native::ReduceOp<([\\w: ]+), at::native::"
      "(?:func_wrapper_t<[\\w: ]+, at::native::(\\w+)[<(].*?|(MeanOps)<[\\w: ]+, ([\\w: ]+), .*?), "
      "unsigned int, ([\\w: ]+), \\d+, \\d+> >\\(");
  static const auto* kLambda = new std::regex("\\{lambda\\(([\\w: ]+), [\\w: ]+\\)#\\d+\\}");
  static const auto* kKinds = new std::map<std::string, Kind>{
      {"sum_functor", Kind::sum},       {"MeanOps", Kind::mean},
      {"MaxNanFunctor", Kind::largest}, {"MinNanFunctor", Kind::smallest},
      {"and_kernel_cuda", Kind::all},   {"or_kernel_cuda", Kind::any}};
  std::smatch found, lambda;
  if (!std::regex_search(name, found, *kName)) return nullptr;
  const auto kind = kKinds->find(found[2].matched ? found[2] : found[3]);
  if (kind == kKinds->end()) return nullptr;
  Reduction reduction = {kind->second, type_named(found[1]), type_named(found[1]),
                         type_named(found[5])};
  if (found[4].matched) reduction.computed = type_named(found[4]);
  if (std::regex_search(name, lambda, *kLambda)) reduction.computed = type_named(lambda[1]);
  const auto known = {reduction.in, reduction.computed, reduction.out};
  if (std::count(known.begin(), known.end(), Type::none)) return nullptr;
  return [reduction](void** arguments, const Grid&) { return prepared(reduction, arguments); };
}

}  // namespace sing_double
