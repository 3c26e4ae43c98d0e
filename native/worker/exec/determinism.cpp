#include "worker/exec/determinism.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <string_view>
#include <utility>

namespace sing {

namespace {

Settings present_settings() {
  Settings values{};
  read_settings(values);
  return values;
}

// Every such error of torch has these words.
bool refuses(const c10::Error& error) {
  return std::string_view(error.what_without_backtrace())
             .find("torch.use_deterministic_algorithms(True)") != std::string_view::npos;
}

}  // namespace

Determinism* Determinism::applied_ = nullptr;
Settings Determinism::applied_settings_{};
std::mutex Determinism::mutex_;

Settings Determinism::initial_settings() {
  const std::lock_guard lock(mutex_);
  return applied_ ? applied_->initial_ : present_settings();
}

Determinism::Determinism() : initial_(initial_settings()) {}

Determinism::~Determinism() {
  const std::lock_guard lock(mutex_);
  if (applied_ != this) return;
  apply_settings(initial_);
  applied_ = nullptr;
}

void Determinism::enter(const std::optional<Settings>& program) {
  const std::lock_guard lock(mutex_);
  if (applied_ == this || (applied_ == nullptr && !program && !on_)) return;
  // Those of ranks are equal, and applying them takes longer than many operators.
  if (applied_ != nullptr && !on_ && !applied_->on_ &&
      program.value_or(initial_) == applied_settings_) {
    applied_ = this;
    return;
  }
  apply_locked(program);
}

void Determinism::set(bool on, const std::optional<Settings>& program) {
  if (on == on_) return;
  on_ = on;
  apply(program);
}

void Determinism::apply(const std::optional<Settings>& program) {
  const std::lock_guard lock(mutex_);
  apply_locked(program);
}

void Determinism::apply_locked(const std::optional<Settings>& program) {
  applied_settings_ = program.value_or(initial_);
  apply_settings(applied_settings_);
  applied_ = this;
  if (!on_) return;
  at::Context& torch = at::globalContext();
  strict_ = torch.deterministicAlgorithms() && !torch.deterministicAlgorithmsWarnOnly();
  // Filling new memory is for who looks for uninitialized values.
  if (!torch.deterministicAlgorithms()) torch.setDeterministicFillUninitializedMemory(false);
  torch.setDeterministicAlgorithms(true, false);
  torch.setDeterministicCuDNN(true);
  torch.setBenchmarkCuDNN(false);
}

bool Determinism::call(const Operator& op, torch::jit::Stack& stack,
                       c10::function_ref<void()> invoke) {
  if (strict_) {
    invoke();
    return true;
  }
  if (!refusing_.contains(op.full_name)) {
    torch::jit::Stack operands = stack;
    try {
      invoke();
      return true;
    } catch (const c10::Error& error) {
      if (!refuses(error)) throw;
    }
    stack = std::move(operands);
    refusing_.insert(op.full_name);
  }
  struct Lenient {
    Lenient() { at::globalContext().setDeterministicAlgorithms(false, false); }
    ~Lenient() { at::globalContext().setDeterministicAlgorithms(true, false); }
  } lenient;
  invoke();
  return false;
}

}  // namespace sing
