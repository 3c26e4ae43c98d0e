// The worker's deterministic algorithms: exact recovery on a GPU, at a cost.
//
// Note [Deterministic recovery]: if the session wants it, the worker uses torch's deterministic
// algorithms, whatever the program has set, and no choice of algorithms by measuring. The mode that
// only warns would not do: attention's backward passes stay inexact in it. An operator that has no
// deterministic algorithm raises an error in the strict mode, before it computes anything; unless
// the program has set that mode itself, it is then called without it, and counts as inexact.
#pragma once

#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "oplog/settings.h"
#include "worker/operators/operators.h"

namespace sing {

class Determinism {
 public:
  Determinism();
  ~Determinism();
  Determinism(const Determinism&) = delete;
  Determinism& operator=(const Determinism&) = delete;

  bool on() const noexcept { return on_; }
  void set(bool on, const std::optional<Settings>& program);
  // Applies the program's settings (none: torch's initial ones), and what this requires beyond.
  void apply(const std::optional<Settings>& program);
  // Applies them if another session of this process has executed with its own since.
  void enter(const std::optional<Settings>& program);
  // Calls an operator while this is on. Returns false if it has no deterministic algorithm.
  bool call(const Operator& op, torch::jit::Stack& stack, c10::function_ref<void()> invoke);

 private:
  static Settings initial_settings();
  void apply_locked(const std::optional<Settings>& program);

  // That of which the settings are applied; null: torch's initial ones are.
  static Determinism* applied_;
  static Settings applied_settings_;  // the program's, if applied_
  static std::mutex mutex_;           // of these, and of torch's settings

  const Settings initial_;
  bool on_ = false;
  bool strict_ = false;  // the program itself wants errors
  std::set<std::string> refusing_;
};

}  // namespace sing
