#include "worker/operators/origins.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace sing {

namespace {

// Implemented in Python during the worker's start-up. Returns a complaint, since a Python exception
// would leave error state in the thread.
constexpr char kImport[] = "import_here(str name, str module, str root, str library) -> str";

TORCH_LIBRARY_FRAGMENT(sing, library) { library.def(kImport); }

struct Said {
  Origin origin;
  std::string complaint;
};

// Written while records are executed or a snapshot is loaded, read while a snapshot is taken.
std::mutex mutex;
std::unordered_map<std::string, Said>& said() {
  static std::unordered_map<std::string, Said> table;
  return table;
}

std::string import_by_python(const std::string& name, const Origin& origin) {
  try {
    torch::jit::Stack stack{name, origin.module, origin.root, origin.library};
    c10::Dispatcher::singleton().findSchemaOrThrow("sing::import_here", "").callBoxed(stack);
    return stack.back().toStringRef();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::string full(const std::string& name, const std::string& overload) {
  return overload.empty() ? name : name + "." + overload;
}

}  // namespace

Origin get_origin(Reader& in) {
  Origin origin;
  origin.module = in.get_string();
  origin.root = in.get_string();
  origin.library = in.get_string();
  return origin;
}

void put_origin(Writer& out, const Origin& origin) {
  out.put_string(origin.module);
  out.put_string(origin.root);
  out.put_string(origin.library);
}

void import_origin(const std::string& name, const std::string& overload, Origin origin) {
  std::string complaint;
  auto& dispatcher = c10::Dispatcher::singleton();
  if (!dispatcher.findSchema({name, overload})) complaint = import_by_python(name, origin);
  const std::lock_guard lock(mutex);
  said()[full(name, overload)] = {std::move(origin), std::move(complaint)};
}

Origin origin_of(const std::string& full_name) {
  const std::lock_guard lock(mutex);
  const auto found = said().find(full_name);
  return found == said().end() ? Origin{} : found->second.origin;
}

std::string complaint_of(const std::string& full_name) {
  const std::lock_guard lock(mutex);
  const auto found = said().find(full_name);
  return found == said().end() ? std::string() : found->second.complaint;
}

}  // namespace sing
