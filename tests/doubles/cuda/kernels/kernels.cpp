#include "kernels/kernels.h"

#include <string.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <regex>
#include <vector>

#include "device/memory.h"
#include "kernels/boxes.h"
#include "kernels/functors.h"
#include "kernels/joining.h"
#include "kernels/offsets.h"
#include "kernels/reduce.h"

namespace sing_double {
namespace {

constexpr int kIllegalAddress = 700;

// Elementwise work: a first operand that is written, and others that are read.
struct Elements {
  std::function<Value(const Value*)> function;
  std::vector<Type> types;     // in memory
  std::vector<Type> computed;  // as the function expects them
  std::vector<char*> data;
  Offsets offsets;
};

// Fills may have gigabytes.
void fill(char* to, const Elements& work, uint64_t count) {
  const size_t size = size_of(work.types[0]);
  store(work.types[0], to, converted(work.function(nullptr), work.computed[0]));
  for (size_t done = size; done < count * size;) {
    const size_t more = std::min(done, count * size - done);
    memcpy(to + done, to, more);
    done += more;
  }
}

int run(const Elements& work) {
  const size_t operands = work.types.size();
  const uint64_t count = work.offsets.count();
  if (!count) return 0;
  std::vector<char*> at(operands);
  for (size_t operand = 0; operand < operands; ++operand) {
    const uint64_t extent = work.offsets.extent(operand, size_of(work.types[operand]));
    at[operand] = memory::bytes_at(work.data[operand], extent);
    if (!at[operand]) return kIllegalAddress;
  }
  if (operands == 1 && work.offsets.sizes.size() == 1 &&
      work.offsets.strides[0][0] == size_of(work.types[0])) {
    fill(at[0], work, count);
    return 0;
  }
  std::vector<Value> in(operands);
  for (uint64_t number = 0; number < count; ++number) {
    for (size_t operand = 1; operand < operands; ++operand) {
      const char* element = at[operand] + work.offsets.at(number, operand);
      in[operand - 1] = converted(load(work.types[operand], element), work.computed[operand]);
    }
    char* to = at[0] + work.offsets.at(number, 0);
    store(work.types[0], to, converted(work.function(in.data()), work.computed[0]));
  }
  return 0;
}

Elements of_functor(const Functor& functor, const char* bytes, const char* data) {
  Elements work;
  work.function = functor.bind(bytes);
  work.computed = {functor.out};
  work.computed.insert(work.computed.end(), functor.in.begin(), functor.in.end());
  work.types = work.computed;
  work.data.resize(work.types.size());
  memcpy(work.data.data(), data, work.data.size() * sizeof(char*));
  return work;
}

void make_contiguous(Elements& work, const void* count) {
  work.offsets.sizes = {*static_cast<const uint32_t*>(count)};
  work.offsets.strides.emplace_back();
  for (const Type type : work.types) {
    work.offsets.strides[0].push_back(static_cast<uint32_t>(size_of(type)));
  }
}

void set_type(Elements& work, size_t operand, int8_t scalar_type) {
  work.types[operand] = static_cast<Type>(scalar_type);
}

// vectorized_elementwise_kernel(int, functor, array of pointers)
Work vectorized(const Functor& functor, void** arguments) {
  Elements work =
      of_functor(functor, static_cast<char*>(arguments[1]), static_cast<char*>(arguments[2]));
  make_contiguous(work, arguments[0]);
  return [work] { return run(work); };
}

// unrolled_elementwise_kernel(int, functor, array, offsets in, offsets out, loader, storer), where
// the types in memory are those of the loader and of the storer, if they convert.
Work unrolled(const Functor& functor, void** arguments, bool cast) {
  Elements work =
      of_functor(functor, static_cast<char*>(arguments[1]), static_cast<char*>(arguments[2]));
  if (cast) set_type(work, 0, *static_cast<int8_t*>(arguments[6]));
  for (size_t operand = 1; cast && operand < work.types.size(); ++operand) {
    set_type(work, operand, static_cast<int8_t*>(arguments[5])[operand - 1]);
  }
  make_contiguous(work, arguments[0]);
  return [work] { return run(work); };
}

// elementwise_kernel(int, closure of an OffsetCalculator, an array of pointers, a functor and, if
// elements are converted, the types in memory)
Work strided(const Functor& functor, void** arguments, bool cast) {
  const char* closure = static_cast<char*>(arguments[1]);
  const size_t operands = functor.in.size() + 1;
  const size_t data = (Offsets::bytes(operands) + 7) / 8 * 8;
  const size_t held = data + operands * sizeof(char*);
  Elements work = of_functor(functor, closure + held, closure + data);
  for (size_t operand = 0; cast && operand < operands; ++operand) {
    set_type(work, operand, static_cast<int8_t>(closure[held + functor.bytes + operand]));
  }
  work.offsets = Offsets::read(closure, operands);
  return [work] { return run(work); };
}

// elementwise_kernel_with_index(int, closure of start and step, result): arange
Work arange(Type type, void** arguments) {
  const Type parameter =
      is_floating(type) ? (type == Type::f64 ? Type::f64 : Type::f32) : Type::i64;
  const auto* closure = static_cast<char*>(arguments[1]);
  const Value start = load(parameter, closure),
              step = load(parameter, closure + size_of(parameter));
  char* to = *static_cast<char**>(arguments[2]);
  const int count = *static_cast<int*>(arguments[0]);
  return [=] {
    char* at = memory::bytes_at(to, static_cast<size_t>(count) * size_of(type));
    if (!at) return kIllegalAddress;
    for (int64_t number = 0; number < count; ++number) {
      const double real = start.real + step.real * static_cast<double>(number);
      const Value value = {real, start.whole + step.whole * number, is_floating(type)};
      store(type, at + static_cast<size_t>(number) * size_of(type), value);
    }
    return 0;
  };
}

// torch dispatches arange's types in this order.
constexpr Type kArangeTypes[] = {Type::u8,  Type::i8,  Type::i32, Type::i64,
                                 Type::i16, Type::f64, Type::f32};

// The text from a position to the comma or bracket that ends the template argument there.
std::string argument_at(const std::string& name, size_t start) {
  int depth = 0;
  for (size_t at = start; at < name.size(); ++at) {
    const char each = name[at];
    if (each == '<' || each == '(' || each == '{') ++depth;
    if (each == '>' || each == ')' || each == '}') --depth;
    if (depth < 0 || (depth == 0 && each == ',')) {
      std::string found = name.substr(start, at - start);
      found.erase(found.find_last_not_of(' ') + 1);
      return found;
    }
  }
  return "";
}

Prepare elementwise(const std::string& name, size_t functor_at,
                    std::function<Work(const Functor&, void**)> prepare) {
  const Functor functor = functor_named(argument_at(name, functor_at));
  if (!functor.bind) return nullptr;
  return [=](void** arguments, const Grid&) { return prepare(functor, arguments); };
}

Prepare find(const std::string& name) {
  static const auto* kVectorized =
      new std::regex("^void at::native::vectorized_elementwise_kernel<\\d+, ");
  static const auto* kUnrolled = new std::regex("^void at::native::unrolled_elementwise_kernel<");
  static const auto* kStrided = new std::regex(
      "^void at::native::elementwise_kernel<\\d+, \\d+, at::native::gpu_kernel_impl(_nocast)?<");
  static const auto* kArange = new std::regex(
      "^void \\(anonymous namespace\\)::elementwise_kernel_with_index<int, "
      "at::native::arange_cuda_out"
      "\\(.*?operator\\(\\)\\(\\) const::\\{lambda\\(\\)#(\\d)\\}");
  std::smatch found;
  if (std::regex_search(name, found, *kVectorized)) {
    return elementwise(name, static_cast<size_t>(found.length()), vectorized);
  }
  const bool cast = name.find("LoadWithCast") != std::string::npos;
  if (std::regex_search(name, found, *kUnrolled) &&
      (name.find("StoreWithCast") != std::string::npos) == cast &&
      name.find("::OffsetCalculator") == std::string::npos) {
    return elementwise(name, static_cast<size_t>(found.length()),
                       [=](const Functor& functor, void** arguments) {
                         return unrolled(functor, arguments, cast);
                       });
  }
  if (std::regex_search(name, found, *kStrided)) {
    const bool converts = !found[1].length();
    return elementwise(name, static_cast<size_t>(found.length()),
                       [=](const Functor& functor, void** arguments) {
                         return strided(functor, arguments, converts);
                       });
  }
  if (std::regex_search(name, found, *kArange)) {
    const size_t number = static_cast<size_t>(std::stoi(found[1])) - 1;
    if (number < std::size(kArangeTypes)) {
      const Type type = kArangeTypes[number];
      return [type](void** arguments, const Grid&) { return arange(type, arguments); };
    }
  }
  if (const Prepare joining = concatenation_named(name)) return joining;
  if (const Prepare suppression = suppression_named(name)) return suppression;
  return reduction_named(name);
}

}  // namespace

Work prepare(const std::string& name, void** arguments, const Grid& grid) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::map<std::string, Prepare>;
  Prepare found;
  {
    const std::lock_guard<std::mutex> guard(*mutex);
    const auto at = known->find(name);
    found = at != known->end() ? at->second : known->emplace(name, find(name)).first->second;
  }
  return found ? found(arguments, grid) : nullptr;
}

}  // namespace sing_double
