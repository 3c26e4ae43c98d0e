#include "client/ops/foreign.h"

#include <Python.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "client/log/forks.h"
#include "client/ops/calls.h"
#include "client/ops/origins.h"

namespace sing::client {

namespace {

constexpr std::array<c10::DispatchKey, 4> kDeviceKeys = {
    c10::DispatchKey::CUDA, c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCsrCUDA,
    c10::DispatchKey::NestedTensorCUDA};

// True if a kernel was registered by Python, judged by the file that torch recorded for it.
// Anything other than a Python file counts as compiled: the worker refuses what it cannot import,
// and nothing is computed here.
bool is_python(std::string_view line) {
  const std::string_view mark = "registered at ";
  const size_t from = line.find(mark), to = line.find(" :: ");
  if (from == std::string_view::npos || to == std::string_view::npos) return false;
  std::string_view file = line.substr(from + mark.size(), to - from - mark.size());
  file = file.substr(0, file.rfind(':'));
  return file.ends_with(".py") || file.starts_with("<");
}

// True if an operator's kernel for a device key is compiled code. This is checked at each call,
// since another kernel may be registered at any time; foreign calls wait for the worker anyway.
bool has_compiled_kernel(const c10::OperatorHandle& op) {
  const auto has = [&](c10::DispatchKey key) { return op.hasKernelForDispatchKey(key); };
  if (std::none_of(kDeviceKeys.begin(), kDeviceKeys.end(), has)) return false;
  const std::string state = op.dumpState();
  for (const c10::DispatchKey key : kDeviceKeys) {
    const std::string begin = std::string("\n") + c10::toString(key) + ": ";
    const size_t at = state.find(begin);
    if (at == std::string::npos) continue;
    if (!is_python(std::string_view(state).substr(at + 1, state.find('\n', at + 1) - at - 1))) {
      return true;
    }
  }
  return false;
}

// True if an operator's only kernel is a compiled composite.
bool is_compiled_composite(const std::string& state, c10::DispatchKey kind) {
  const std::string begin = std::string("\n") + c10::toString(kind) + "[alias]: ";
  const size_t at = state.find(begin);
  return at != state.npos &&
         !is_python(std::string_view(state).substr(at + 1, state.find('\n', at + 1) - at - 1));
}

bool is_compiled_composite(const c10::OperatorHandle& op) {
  const bool implicit = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if (!implicit && !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
    return false;
  }
  return is_compiled_composite(op.dumpState(), implicit
                                                   ? c10::DispatchKey::CompositeImplicitAutograd
                                                   : c10::DispatchKey::CompositeExplicitAutograd);
}

bool is_plain_operand(const c10::IValue& value, bool recorded) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() && tensor.device().type() == kDevice &&
           !(recorded && tensor.requires_grad());
  }
  if (value.isTensorList() || value.isOptionalTensorList()) {
    const auto items = value.toListRef();
    return std::all_of(items.begin(), items.end(),
                       [&](const c10::IValue& item) { return is_plain_operand(item, recorded); });
  }
  return value.isNone() || value.isInt() || value.isDouble() || value.isBool() ||
         value.isString() || value.isIntList() || value.isDoubleList() || value.isBoolList();
}

// True if a composite may be executed as a whole by the worker, which has no autograd, no autocast
// and no operands on the host. All others run here, up to the first address that they request.
bool may_be_whole(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (at::autocast::is_autocast_enabled(kDevice)) return false;
  const bool recorded = c10::GradMode::is_enabled();
  const size_t operands = op.schema().arguments().size();
  return std::all_of(stack.end() - static_cast<std::ptrdiff_t>(operands), stack.end(),
                     [&](const c10::IValue& value) { return is_plain_operand(value, recorded); });
}

void route(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (keys.has_backend(c10::BackendComponent::CUDABit) &&
      (has_compiled_kernel(op) || (is_compiled_composite(op) && may_be_whole(op, *stack)))) {
    call(op, keys, stack);
    return;
  }
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  op.redispatchBoxed(keys & below, stack);
}

// Keys of tensors that stand for others, which a composite resolves by its operators.
constexpr c10::DispatchKeySet kStandIns({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor,
                                         c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper});

// For AutogradCUDA, where the dispatcher would run a composite before it reaches `route`.
void route_composite(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !op.hasKernelForDispatchKey(c10::DispatchKey::Autograd), op.schema().name(),
      ": a library that was loaded later defines its derivative, which cannot be used here.");
  if (!keys.has_any(kStandIns) && may_be_whole(op, *stack)) {
    call(op, keys, stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CUDA), stack);
  }
}

// True if the dispatcher runs an operator's composite kernel at AutogradCUDA.
bool is_composite_with_derivative(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::Autograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::AutogradCUDA) && is_compiled_composite(op);
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const c10::Argument& argument) {
                       return argument.type()->str().find("Tensor") != std::string::npos;
                     });
}

// New operators that have no kernel of ours yet, and the names of all that ever had one.
class Newcomers {
 public:
  static Newcomers& get() {
    static auto* instance = new Newcomers();
    return *instance;
  }

  void note(const c10::OperatorName& name) {
    std::lock_guard lock(mutex_);
    noted_.push_back(name);
  }

  std::vector<c10::OperatorName> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(noted_, {});
  }

  // Returns false if the operator already has its kernel: it was defined again.
  bool add(const c10::OperatorName& name) {
    std::lock_guard lock(mutex_);
    return known_.insert(c10::toString(name)).second;
  }

 private:
  std::mutex mutex_;
  const HeldAtFork held_{mutex_};
  std::vector<c10::OperatorName> noted_;
  std::unordered_set<std::string> known_;
};

// True if a loaded library registers kernels with torch, judged by the symbol names that it needs.
bool registers_kernels(const dl_phdr_info& library) {
  for (size_t i = 0; i < library.dlpi_phnum; ++i) {
    if (library.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const char* names = nullptr;
    size_t bytes = 0;
    const auto* entry =
        reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + library.dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry) {
      if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_STRSZ) bytes = entry->d_un.d_val;
    }
    if (reinterpret_cast<uintptr_t>(names) < library.dlpi_addr) return false;  // not relocated
    const std::string_view text(names, bytes);
    return text.find("5torch7Library") != text.npos || text.find("RegisterOperators") != text.npos;
  }
  return false;
}

struct Libraries {
  std::unordered_set<uintptr_t> known;
  unsigned long long loaded = 0;
  bool register_kernels = false;  // a new library registers kernels
};

int look_at(dl_phdr_info* library, size_t, void* context) {
  auto& libraries = *static_cast<Libraries*>(context);
  if (libraries.loaded == library->dlpi_adds)
    return 1;  // no library was loaded since the last
               // check
  // The first check only records what is loaded: torch, which has very many names.
  const bool fresh = libraries.known.insert(library->dlpi_addr).second && libraries.loaded != 0;
  if (fresh && registers_kernels(*library)) libraries.register_kernels = true;
  return 0;
}

// True if a library that may have kernels was loaded since the last call.
bool may_have_new_kernels() {
  static std::mutex mutex;
  static Libraries libraries;
  std::lock_guard lock(mutex);
  libraries.register_kernels = false;
  dl_iterate_phdr(&look_at, &libraries);
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* context) {
        static_cast<Libraries*>(context)->loaded = library->dlpi_adds;
        return 1;
      },
      &libraries);
  return libraries.register_kernels;
}

void refuse_replaced(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      ": a library that was loaded replaces torch's kernel for CUDA by its own, which needs the "
      "GPU in this process and cannot run here; do not load that library.");
}

// True if a line of `dumpState` describes torch's own kernel, or ours.
bool is_own(std::string_view line) {
  static const std::string ours(__FILE__, sizeof(__FILE__) - sizeof("ops/foreign.cpp"));
  return line.find(ours) != line.npos || line.find("aten/src/ATen/") != line.npos;
}

// Refuses calls of torch's operators whose CUDA kernels another library has replaced by kernels
// that are compiled for a GPU.
void refuse_replacements() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    const std::string state = op->dumpState();
    const size_t at = state.find("\nCUDA: ");
    if (at == state.npos) continue;
    const auto line = std::string_view(state).substr(at + 1, state.find('\n', at + 1) - at - 1);
    if (is_own(line) || is_python(line)) continue;
    auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                       __FILE__, __LINE__);
    std::string local = name.name.substr(std::string_view("aten::").size());
    if (!name.overload_name.empty()) local += "." + name.overload_name;
    library->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse_replaced>());
  }
}

int take_over_pending(void*) {
  take_over_operators();
  return 0;
}

class Listener final : public c10::OpRegistrationListener {
 public:
  // The dispatcher's lock is held, so nothing can be registered here.
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    if (!watching || !is_foreign(op.schema().name()) || !takes_tensors(op.schema())) return;
    Newcomers::get().note(op.operator_name());
    Py_AddPendingCall(&take_over_pending, nullptr);
  }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {}

  // Torch's own operators, for which the listener is called first, are not recorded.
  static inline bool watching = false;
};

}  // namespace

void watch_operators() {
  // Never unregistered: operators may be defined until the process ends. Those that exist already
  // are torch's own, which `register_kernels` and `register_refusals` handle.
  static auto* handle = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
  (void)handle;
  Listener::watching = true;
  may_have_new_kernels();
}

void take_over_operators() {
  if (may_have_new_kernels()) refuse_replacements();
  for (const c10::OperatorName& name : Newcomers::get().take()) {
    if (!Newcomers::get().add(name)) continue;
    const size_t colons = name.name.find("::");
    auto* library = new torch::Library(torch::Library::IMPL, name.name.substr(0, colons),
                                       c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    std::string local = name.name.substr(colons + 2);
    if (!name.overload_name.empty()) local += "." + name.overload_name;
    library->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&route>());
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op.has_value() || !is_composite_with_derivative(*op)) continue;
    auto* derivative = new torch::Library(torch::Library::IMPL, name.name.substr(0, colons),
                                          c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__);
    derivative->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&route_composite>());
  }
}

}  // namespace sing::client
