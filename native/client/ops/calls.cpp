#include "client/ops/calls.h"

#include <algorithm>
#include <memory>

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DispatchKeySet.h>

#include "client/ops/capture.h"
#include "client/ops/compound.h"
#include "client/ops/encode.h"
#include "client/ops/requests.h"
#include "client/ops/results.h"

namespace sing::client {

namespace {

using torch::jit::Stack;

// Set while torch's shape function of a structured operator runs: the out= call that it makes at
// its end has operands of the right size.
thread_local const std::string* sized_by = nullptr;

class SizedBy {
 public:
  explicit SizedBy(const std::string* name) : outer_(sized_by) { sized_by = name; }
  ~SizedBy() { sized_by = outer_; }
  SizedBy(const SizedBy&) = delete;
  SizedBy& operator=(const SizedBy&) = delete;

 private:
  const std::string* outer_;
};

// "aten::add" and "aten::add_" end in a call of "aten::add" with out=.
bool same_operator(const std::string& name, const std::string& functional) {
  const size_t length = functional.size() - (functional.ends_with('_') ? 1 : 0);
  return name.size() == length && functional.compare(0, length, name) == 0;
}

// ------------------------------------------------------------------ operands on the host

void check_host_operand(const Operator& op, const at::Tensor& tensor, size_t index) {
  TORCH_CHECK(index > 0 || !op.self_on_device,
              "masked_fill: Expected inputs to be on same device");  // CUDA's kernel has this text
  const std::string& name = op.schema.arguments()[index].name();
  TORCH_CHECK(tensor.dim() == 0 || (op.host_indices && name != "values"),
              "Expected all tensors to be on the same device, but found at least two devices, "
              "cuda:0 and ",
              tensor.device(), "! (when checking argument for argument ", name, " in method ",
              op.name, ")");
}

// Index tensors on the host are allowed, as on a GPU: they are moved here.
void prepare_operands(const Operator& op, Stack& stack) {
  const size_t base = stack.size() - op.operands;
  for (size_t i = 0; i < op.operands; ++i) {
    c10::IValue& value = stack[base + i];
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!must_move(tensor)) continue;
      check_host_operand(op, tensor, i);
      value = tensor.to(c10::Device(kDevice, current_label));
    } else if (value.isList() && !value.isIntList() && !value.isDoubleList() &&
               !value.isBoolList()) {
      const auto items = value.toListRef();
      const auto found = std::find_if(items.begin(), items.end(), [](const c10::IValue& item) {
        return item.isTensor() && must_move(item.toTensor());
      });
      if (found == items.end()) continue;
      check_host_operand(op, found->toTensor(), i);
      c10::List<std::optional<at::Tensor>> moved;
      for (const c10::IValue& item : items) {
        if (!item.isTensor()) {
          moved.push_back(std::nullopt);
        } else {
          const at::Tensor& tensor = item.toTensor();
          moved.push_back(must_move(tensor) ? tensor.to(c10::Device(kDevice, current_label))
                                            : tensor);
        }
      }
      value = std::move(moved);
    }
  }
}

// ------------------------------------------------------------------ structured operators

void remember(std::span<const std::byte> key, const Operator& op, const Stack& stack) {
  auto plan = std::make_shared<Plan>();
  for (size_t i = 0; i < op.returns; ++i) {
    const c10::IValue& value = stack[stack.size() - op.returns + i];
    if (op.aliases[i] >= 0) {
      plan->outputs.emplace_back();
    } else if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& tensor = value.toTensor();
      Output output;
      output.tag = Tag::tensor;
      output.geometry = geometry_of(tensor);
      output.bytes = tensor.storage().nbytes();
      plan->outputs.push_back(std::move(output));
    } else {
      return;  // a list or none: not a shape that this cache describes
    }
  }
  PlanCache::get().insert(key, std::move(plan));
}

// Torch computes the shapes, allocates, and calls the out= form, which arrives in call() again.
void call_structured(Operator& op, std::span<const std::byte> key, Stack& stack) {
  const std::vector<std::byte> kept(key.begin(), key.end());
  {
    const SizedBy scope(&op.schema.name());
    const ShapesOnly may_ask;
    const at::DisableRecordFunctionGuard unseen;  // profilers have seen this operator already
    // A key without kernels of its own: the dispatcher then finds the composite kernel.
    op.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::IPU), &stack);
  }
  if (!kept.empty()) remember(kept, op, stack);
}

void finish_in_place(Operator& op, Encoder& encoder, Stack& stack) {
  send_in_place(op, encoder);
  finish(op, stack, Results(op.returns));
}

void finish_planned(Operator& op, Encoder& encoder, const Plan& plan, Stack& stack) {
  if (!plan.changes.empty()) {
    for (const Change& change : plan.changes) apply(change, operands_of(op, stack), false);
    encoder.call(op, operands_of(op, stack));
  }
  finish(op, stack, send_planned(op, encoder, plan));
}

// A dense tensor to which a sparse one of the same size is added keeps its geometry.
bool keeps_geometry(const Operator& op, c10::ArrayRef<c10::IValue> operands) {
  if (!op.dense_keeps_shape) return false;
  const at::Tensor &self = operands[0].toTensor(), &other = operands[1].toTensor();
  return !is_compound(self) && self.sizes() == other.sizes() && !self.is_complex() &&
         self.scalar_type() == other.scalar_type();
}

// Calls an operator of sparse tensors. If its results are dense, equal sizes give equal geometry.
void call_sparse(Operator& op, Encoder& encoder, Stack& stack, bool outermost) {
  if (keeps_geometry(op, operands_of(op, stack))) {
    finish_in_place(op, encoder, stack);
    return;
  }
  const Plan* plan = op.dynamic ? nullptr : PlanCache::get().find(encoder.key(), outermost);
  if (plan != nullptr) {
    finish_planned(op, encoder, *plan, stack);
  } else {
    call_and_wait(op, encoder, stack);
  }
}

// A shape function does not check whether a kernel supports these dtypes and strings, but a native
// device would report it now. So the first call with operands of each kind waits until it was
// executed, and calls with other kinds make no plan.
class FirstOfItsKind {
 public:
  FirstOfItsKind(Operator& op, const Stack& stack)
      : op_(op), kinds_(kinds_of(operands_of(op, stack))), known_(op.knows(kinds_)) {}
  bool known() const { return known_; }
  void wait() const {
    if (known_ || Session::capturing()) return;
    Session::get().synchronize();
    op_.learn(kinds_);
  }

 private:
  Operator& op_;
  const std::string kinds_;
  const bool known_;
};

// Note [Backward]: torch walks the graph of a device's tensors in a thread of that device, while
// the caller waits for it, and the graph of CPU tensors in the caller's thread. Each handover wakes
// two threads per step, and has no benefit here: operators are only written to the log. So the
// calling thread walks the device's graphs itself.
void begin_thread() { c10::AutogradState::get_tls_state().set_multithreading_enabled(false); }

// A borrowed encoder. Encoders keep their buffers; a shape function of torch may call operators
// while one is in use.
class Borrowed {
 public:
  Borrowed() {
    if (pool.empty()) begin_thread();
    if (depth >= pool.size()) pool.push_back(std::make_unique<Encoder>());
    encoder_ = pool[depth++].get();
  }
  ~Borrowed() {
    encoder_->let_go();
    --depth;
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Encoder& operator*() { return *encoder_; }
  // True if no other call of this thread is in progress.
  bool outermost() const { return depth == 1; }

 private:
  static thread_local std::vector<std::unique_ptr<Encoder>> pool;
  static thread_local size_t depth;
  Encoder* encoder_;
};
thread_local std::vector<std::unique_ptr<Encoder>> Borrowed::pool;
thread_local size_t Borrowed::depth = 0;

// See Note [Labels].
c10::DeviceIndex label_of(const Encoder& encoder, c10::ArrayRef<c10::IValue> operands) {
  const auto& tensors = encoder.tensors();
  return tensors.empty() ? requested_label(operands) : tensors[0]->device().index();
}

}  // namespace

std::optional<Results> call_known(Operator& op, c10::function_ref<void(Encoder&)> encode) {
  if (op.dynamic || op.trusted != nullptr) return std::nullopt;  // such operators have no plans
  const SizedBy inner(nullptr);
  Borrowed borrowed;
  Encoder& encoder = *borrowed;
  encoder.begin(op);
  encode(encoder);
  const Labelled results(label_of(encoder, {}));
  if (encoder.has_compound() || (op.masks && encoder.has_mask())) return std::nullopt;
  const Plan* plan = PlanCache::get().find_nearby(encoder.key());
  if (plan == nullptr || !plan->changes.empty()) return std::nullopt;
  return send_planned(op, encoder, *plan);
}

void call(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
  Operator& op = find_operator(handle);
  const bool sized =
      op.has_out && sized_by != nullptr && same_operator(op.schema.name(), *sized_by);
  const SizedBy inner(nullptr);
  prepare_operands(op, *stack);
  Borrowed borrowed;
  Encoder& encoder = *borrowed;
  encoder.call(op, operands_of(op, *stack));
  const Labelled results(label_of(encoder, operands_of(op, *stack)));
  if (encoder.has_compound()) {
    call_sparse(op, encoder, *stack, borrowed.outermost());
    return;
  }
  if (sized || (op.trusted != nullptr && op.trusted(operands_of(op, *stack)))) {
    finish_in_place(op, encoder, *stack);
    return;
  }
  const bool dynamic = op.dynamic || (op.masks && encoder.has_mask());
  if (!dynamic) {
    if (const Plan* plan = PlanCache::get().find(encoder.key(), borrowed.outermost())) {
      finish_planned(op, encoder, *plan, *stack);
      return;
    }
  }
  if (op.structured) {
    const FirstOfItsKind first(op, *stack);
    const bool remembered = !dynamic && first.known();
    call_structured(op, remembered ? encoder.key() : std::span<const std::byte>(), *stack);
    first.wait();
    return;
  }
  if (op.shape != nullptr && !dynamic) {
    auto plan = std::make_shared<Plan>();
    if (op.shape(operands_of(op, *stack), *plan)) {
      const FirstOfItsKind first(op, *stack);
      if (first.known()) PlanCache::get().insert(encoder.key(), plan);
      finish_planned(op, encoder, *plan, *stack);
      first.wait();
      return;
    }
  }
  if (Session::capturing() && !dynamic && op.plain) {
    if (const std::shared_ptr<Plan> plan = probe(op, operands_of(op, *stack))) {
      PlanCache::get().insert(encoder.key(), plan);
      finish_planned(op, encoder, *plan, *stack);
      return;
    }
  }
  call_and_wait(op, encoder, *stack);
}

}  // namespace sing::client
