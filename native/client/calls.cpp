#include "client/calls.h"

#include <algorithm>
#include <unordered_map>

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DispatchKeySet.h>

#include "client/capture.h"
#include "client/compound.h"
#include "client/encode.h"
#include "client/generators.h"

namespace sing::client {

namespace {

using torch::jit::Stack;

constexpr uint32_t kListItemsMax = 256;         // results of an operator with an unknown number
constexpr uint64_t kRoom = uint64_t{64} << 20;  // asked for before a request is tried again

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

c10::ArrayRef<c10::IValue> operands_of(const Operator& op, const Stack& stack) {
  return c10::ArrayRef<c10::IValue>(stack.data() + (stack.size() - op.operands), op.operands);
}

// ------------------------------------------------------------------ operands on the host

void check_host_operand(const Operator& op, const at::Tensor& tensor, size_t index) {
  TORCH_CHECK(index > 0 || op.name != "aten::masked_fill_.Tensor",
              "masked_fill: Expected inputs to be on same device");  // CUDA's kernel says it so
  TORCH_CHECK(tensor.dim() == 0 || op.host_indices,
              "Expected all tensors to be on the same device, but found at least two devices, "
              "cuda:0 and ",
              tensor.device(), "! (when checking argument for argument ",
              op.schema.arguments()[index].name(), " in method ", op.name, ")");
}

bool must_move(const at::Tensor& tensor) {
  return tensor.defined() && !on_device(tensor) && tensor.dim() != 0;
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
      value = tensor.to(c10::Device(kDevice, 0));
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
          moved.push_back(must_move(tensor) ? tensor.to(c10::Device(kDevice, 0)) : tensor);
        }
      }
      value = std::move(moved);
    }
  }
}

// ------------------------------------------------------------------ results

using Results = c10::SmallVector<c10::IValue, 4>;

// Drops the operands and pushes the results; results that are operands are taken from them.
void finish(const Operator& op, Stack& stack, Results&& fresh) {
  const size_t base = stack.size() - op.operands;
  for (size_t i = 0; i < op.returns; ++i) {
    if (op.aliases[i] >= 0) fresh[i] = stack[base + static_cast<size_t>(op.aliases[i])];
  }
  torch::jit::drop(stack, op.operands);
  for (c10::IValue& value : fresh) stack.push_back(std::move(value));
}

void pin_operands(const Encoder& encoder) {
  for (const at::Tensor* tensor : encoder.tensors()) Session::get().pin(slot_of(*tensor));
}

void send_in_place(Operator& op, Encoder& encoder, Stack& stack) {
  for (size_t i = 0; i < op.returns; ++i) encoder.record().put(Tag::none);
  if (Session::capturing()) pin_operands(encoder);
  Session::get().append(RecordKind::call, encoder.record().view(), {}, encoder.flags());
  finish(op, stack, Results(op.returns));
}

// Builds planned outputs and writes them to the record.
class Emitter {
 public:
  // `several`: later outputs may share the storages of earlier ones.
  Emitter(Encoder& encoder, bool several)
      : encoder_(encoder), out_(encoder.record()), several_(several) {}

  c10::IValue output(const Output& planned) {
    if (planned.tag == Tag::integer) {
      out_.put(Tag::none);
      return planned.number;
    }
    out_.put(planned.tag);
    switch (planned.tag) {
      case Tag::tensor: {
        Slot* slot = Session::get().allocate(planned.bytes, false);
        at::Tensor result = make_tensor(make_storage(slot), planned.geometry);
        out_.put<uint32_t>(slot->id);
        out_.put<uint64_t>(planned.bytes);
        put_geometry(out_, planned.geometry);
        if (several_) results_.push_back(result);
        return result;
      }
      case Tag::alias: {
        const at::Tensor& owner = planned.source >= 0
                                      ? *encoder_.tensors()[static_cast<size_t>(planned.source)]
                                      : results_[static_cast<size_t>(-1 - planned.source)];
        out_.put<uint32_t>(slot_of(owner)->id);
        put_geometry(out_, planned.geometry);
        at::Tensor result = make_tensor(owner.storage(), planned.geometry);
        if (several_) results_.push_back(result);
        return result;
      }
      case Tag::list: {
        c10::List<at::Tensor> list;
        several_ = true;
        out_.put<uint32_t>(static_cast<uint32_t>(planned.items.size()));
        for (const Output& item : planned.items) list.push_back(output(item).toTensor());
        return list;
      }
      case Tag::undefined:
        if (several_) results_.emplace_back();
        return at::Tensor();
      default:
        return {};
    }
  }

 private:
  Encoder& encoder_;
  Writer& out_;
  bool several_;
  c10::SmallVector<at::Tensor, 4> results_;
};

at::Tensor element(const c10::IValue& operand, uint16_t index) {
  return operand.isTensor() ? operand.toTensor() : operand.toListRef()[index].toTensor();
}

// Gives an out= operand the geometry that the operator will write.
void apply(const Change& change, c10::ArrayRef<c10::IValue> operands, bool told) {
  const at::Tensor tensor = element(operands[change.operand], change.element);
  auto* impl = tensor.unsafeGetTensorImpl();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (change.bytes > storage->nbytes()) {
    if (told) {
      adopt_size(storage, change.bytes);
    } else {
      resize_storage(storage, change.bytes);
    }
  }
  impl->set_sizes_and_strides(change.geometry.sizes, change.geometry.strides,
                              change.geometry.offset);
}

void send_planned(Operator& op, Encoder& encoder, const Plan& plan, Stack& stack) {
  if (!plan.changes.empty()) {
    for (const Change& change : plan.changes) apply(change, operands_of(op, stack), false);
    encoder.call(op, operands_of(op, stack));
  }
  static const Output nothing;
  Emitter emitter(encoder, op.returns > 1);
  Results fresh(op.returns);
  for (size_t i = 0; i < op.returns; ++i) {
    fresh[i] = emitter.output(plan.outputs.empty() ? nothing : plan.outputs[i]);
  }
  if (Session::capturing()) pin_operands(encoder);
  Session::get().append(RecordKind::call, encoder.record().view(), {}, encoder.flags());
  finish(op, stack, std::move(fresh));
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
      return;  // a list or nothing: not a shape that this cache describes
    }
  }
  PlanCache::get().insert(key, std::move(plan));
}

// torch computes the shapes, allocates, and calls the out= form, which comes back to call().
void call_structured(Operator& op, std::span<const std::byte> key, Stack& stack) {
  const std::vector<std::byte> kept(key.begin(), key.end());
  {
    const SizedBy scope(&op.schema.name());
    // A key without kernels of its own: the dispatcher finds the composite one behind it.
    op.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::IPU), &stack);
  }
  if (!kept.empty()) remember(kept, op, stack);
}

// ------------------------------------------------------------------ requests

class Request {
 public:
  Request(Operator& op, Encoder& encoder, c10::ArrayRef<c10::IValue> operands)
      : op_(op), encoder_(encoder) {
    Writer& out = encoder.record();
    for (size_t i = 0; i < op.returns; ++i) {
      const c10::TypePtr& type = op.schema.returns()[i].type();
      if (may_be_compound(i, operands)) {
        out.put(Tag::compound);
        for (size_t k = 0; k < kPartsMax; ++k) out.put<uint32_t>(reserve()->id);
      } else if (op.aliases[i] >= 0) {
        out.put(Tag::none);
      } else if (type->kind() == c10::TypeKind::TensorType) {
        out.put(Tag::tensor);
        out.put<uint32_t>(reserve()->id);
      } else if (type->kind() == c10::TypeKind::ListType) {
        const auto count =
            std::max<uint32_t>(kListItemsMax, static_cast<uint32_t>(encoder.tensors().size()));
        out.put(Tag::list);
        out.put<uint32_t>(count);
        for (uint32_t k = 0; k < count; ++k) out.put<uint32_t>(reserve()->id);
      } else {
        out.put(Tag::none);
      }
    }
  }
  ~Request() {
    for (Slot* slot : slots_) {
      if (slot != nullptr) Session::get().free(slot);
    }
  }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  // The results, and the plan for the next call with such operands (null: do not remember).
  Results run(c10::ArrayRef<c10::IValue> operands, std::shared_ptr<Plan>& plan) {
    const std::vector<std::byte> bytes = send();
    Reader in(bytes);
    plan = std::make_shared<Plan>();
    Results results(op_.returns);
    for (size_t i = 0; i < op_.returns; ++i) {
      Output planned;
      results[i] = read(in, planned);
      plan->outputs.push_back(std::move(planned));
      if (op_.aliases[i] >= 0 && results[i].isTensor()) {
        replace(operands[static_cast<size_t>(op_.aliases[i])].toTensor(), results[i].toTensor());
      }
    }
    const uint32_t changes = in.get_count(8);
    for (uint32_t i = 0; in.ok() && i < changes; ++i) {
      Change change;
      change.operand = in.get<uint16_t>();
      change.element = in.get<uint16_t>();
      change.bytes = in.get<uint64_t>();
      change.geometry = get_geometry(in);
      TORCH_CHECK(in.ok() && change.operand < op_.operands, "unreadable answer for ", op_.name);
      apply(change, operands, true);
      plan->changes.push_back(std::move(change));
    }
    TORCH_CHECK(in.ok(), "unreadable answer for ", op_.name);
    if (!rememberable_) plan.reset();
    return results;
  }

 private:
  // Results of operators of sparse tensors; what such an operator changes may get other parts.
  bool may_be_compound(size_t i, c10::ArrayRef<c10::IValue> operands) const {
    if (!encoder_.has_compound() ||
        op_.schema.returns()[i].type()->kind() != c10::TypeKind::TensorType) {
      return false;
    }
    return op_.aliases[i] < 0 ||
           is_compound(operands[static_cast<size_t>(op_.aliases[i])].toTensor());
  }

  Slot* reserve() {
    slots_.push_back(Session::get().allocate(0, false));
    return slots_.back();
  }

  // The worker runs out of memory before the client does when a result's size was not known here.
  // The agent may have room: one more try.
  std::vector<std::byte> send() {
    Session& session = Session::get();
    try {
      return session.request(RecordKind::call, encoder_.record().view(), encoder_.flags());
    } catch (const c10::OutOfMemoryError&) {
      uint64_t bytes = kRoom;
      for (const at::Tensor* tensor : encoder_.tensors()) bytes += 2 * tensor->nbytes();
      if (!session.try_reserve(bytes)) throw;
    }
    return session.request(RecordKind::call, encoder_.record().view(), encoder_.flags());
  }

  c10::IValue read(Reader& in, Output& planned) {
    planned.tag = in.get<Tag>();
    switch (planned.tag) {
      case Tag::none:
        return {};
      case Tag::undefined:
        results_.emplace_back();
        return at::Tensor();
      case Tag::tensor: {
        const uint32_t id = in.get<uint32_t>();
        planned.bytes = in.get<uint64_t>();
        planned.geometry = get_geometry(in);
        const auto slot = std::find_if(slots_.begin(), slots_.end(),
                                       [&](Slot* s) { return s != nullptr && s->id == id; });
        TORCH_CHECK(in.ok() && slot != slots_.end(), "unreadable answer for ", op_.name);
        Session::get().charge(*slot, planned.bytes);
        results_.push_back(make_tensor(make_storage(*slot), planned.geometry));
        *slot = nullptr;
        return results_.back();
      }
      case Tag::alias: {
        const uint32_t id = in.get<uint32_t>();
        planned.geometry = get_geometry(in);
        TORCH_CHECK(in.ok(), "unreadable answer for ", op_.name);
        results_.push_back(make_tensor(owner(id, planned.source).storage(), planned.geometry));
        return results_.back();
      }
      case Tag::list: {
        const uint32_t count = in.get_count(1);
        c10::List<at::Tensor> list;
        for (uint32_t i = 0; i < count; ++i) {
          planned.items.emplace_back();
          list.push_back(read(in, planned.items.back()).toTensor());
        }
        return list;
      }
      case Tag::compound:
        rememberable_ = false;
        return read_compound(in);
      case Tag::integer:
        rememberable_ = rememberable_ && op_.counts;
        planned.number = in.get<int64_t>();
        return planned.number;
      case Tag::real:
        rememberable_ = false;
        return in.get<double>();
      case Tag::boolean:
        rememberable_ = false;
        return in.get<uint8_t>() != 0;
      case Tag::complex: {
        rememberable_ = false;
        const double real = in.get<double>();
        return c10::complex<double>(real, in.get<double>());
      }
      default:
        TORCH_CHECK(false, "unreadable answer for ", op_.name);
    }
  }

  at::Tensor read_compound(Reader& in) {
    const Compound compound = get_compound(in);
    TORCH_CHECK(in.ok(), "unreadable answer for ", op_.name);
    Parts parts;
    for (size_t i = 0; i < compound.parts(); ++i) {
      Output planned;
      parts.push_back(read(in, planned).toTensor());
      // Grown in place.
      auto* storage = parts.back().unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      const uint64_t needed = planned.geometry.storage_bytes();
      if (needed > storage->nbytes()) adopt_size(storage, needed);
    }
    return assemble(compound, parts);
  }

  const at::Tensor& owner(uint32_t id, int32_t& source) {
    const auto& operands = encoder_.tensors();
    for (size_t i = 0; i < operands.size(); ++i) {
      if (slot_of(*operands[i])->id == id) {
        source = static_cast<int32_t>(i);
        return *operands[i];
      }
    }
    for (size_t i = 0; i < results_.size(); ++i) {
      if (results_[i].defined() && slot_of(results_[i])->id == id) {
        source = -1 - static_cast<int32_t>(i);
        return results_[i];
      }
    }
    TORCH_CHECK(false, "the answer for ", op_.name, " names a storage that it does not have");
  }

  Operator& op_;
  Encoder& encoder_;
  std::vector<Slot*> slots_;
  std::vector<at::Tensor> results_;
  bool rememberable_ = true;
};

void call_and_wait(Operator& op, Encoder& encoder, Stack& stack) {
  std::shared_ptr<Plan> plan;
  Results results;
  {
    Request request(op, encoder, operands_of(op, stack));
    results = request.run(operands_of(op, stack), plan);
  }
  if (plan != nullptr && !op.dynamic && (op.plain || op.counts))
    PlanCache::get().insert(encoder.key(), plan);
  finish(op, stack, std::move(results));
}

// Zeros in the geometry of an operand: nobody reads them, so they take memory in the worker only.
c10::IValue imitation(const c10::IValue& value,
                      std::unordered_map<const c10::TensorImpl*, at::Tensor>& made) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !on_device(tensor)) return value;
    at::Tensor& zeros = made[tensor.unsafeGetTensorImpl()];
    if (!zeros.defined()) {
      zeros = make_tensor(make_storage(Session::get().allocate(tensor.storage().nbytes(), true)),
                          geometry_of(tensor));
      if (tensor.is_conj()) zeros._set_conj(true);
      if (tensor.is_neg()) zeros._set_neg(true);
    }
    return zeros;
  }
  if (value.isGenerator() && value.toGenerator().defined()) return new_generator();
  if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
  c10::List<std::optional<at::Tensor>> list;
  for (const c10::IValue& item : value.toListRef()) {
    const c10::IValue zeros = imitation(item, made);
    list.push_back(zeros.isTensor() ? std::optional(zeros.toTensor()) : std::nullopt);
  }
  return list;
}

// What an operator would return, learnt without executing it on its operands; null if it cannot be.
std::shared_ptr<Plan> probe(Operator& op, c10::ArrayRef<c10::IValue> operands) {
  const Probing probing(op.handle.hasTag(at::Tag::nondeterministic_seeded));
  std::unordered_map<const c10::TensorImpl*, at::Tensor> made;
  Stack stack;
  for (const c10::IValue& operand : operands) stack.push_back(imitation(operand, made));
  Encoder encoder;
  encoder.call(op, stack);
  std::shared_ptr<Plan> plan;
  try {
    Request(op, encoder, stack).run(stack, plan);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, op.name, " cannot be captured before it has run once on such operands; ",
                "warm up first (", error.what_without_backtrace(), ")");
  }
  return plan;
}

// A dense tensor that gets a sparse one of the same size added keeps its geometry.
bool keeps_geometry(const Operator& op, c10::ArrayRef<c10::IValue> operands) {
  if (op.name != "aten::add_.Tensor") return false;
  const at::Tensor &self = operands[0].toTensor(), &other = operands[1].toTensor();
  return !is_compound(self) && self.sizes() == other.sizes() && !self.is_complex() &&
         self.scalar_type() == other.scalar_type();
}

// An operator of sparse tensors. Where its results are dense, equal sizes make equal results.
void call_sparse(Operator& op, Encoder& encoder, Stack& stack, bool outermost) {
  if (keeps_geometry(op, operands_of(op, stack))) {
    send_in_place(op, encoder, stack);
    return;
  }
  const Plan* plan = op.dynamic ? nullptr : PlanCache::get().find(encoder.key(), outermost);
  if (plan != nullptr) {
    send_planned(op, encoder, *plan, stack);
  } else {
    call_and_wait(op, encoder, stack);
  }
}

// Whether a kernel takes such dtypes and strings, no shape function says, but a native device would
// say it now: the first call with operands of each kind waits until it was executed, and makes no
// plan for others.
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
// the caller waits for it, and the graph of the CPU's in the caller's. To hand it over and back
// wakes two threads at every step, and here nothing is gained by it: operators are only written
// down. So who uses the device walks its graphs itself.
void begin_thread() { c10::AutogradState::get_tls_state().set_multithreading_enabled(false); }

// Encoders keep their buffers; a shape function of torch may call operators while one is in use.
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
  // No other call of this thread has one.
  bool outermost() const { return depth == 1; }

 private:
  static thread_local std::vector<std::unique_ptr<Encoder>> pool;
  static thread_local size_t depth;
  Encoder* encoder_;
};
thread_local std::vector<std::unique_ptr<Encoder>> Borrowed::pool;
thread_local size_t Borrowed::depth = 0;

}  // namespace

void call(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
  Operator& op = find_operator(handle);
  const bool sized =
      op.has_out && sized_by != nullptr && same_operator(op.schema.name(), *sized_by);
  const SizedBy inner(nullptr);
  prepare_operands(op, *stack);
  Borrowed borrowed;
  Encoder& encoder = *borrowed;
  encoder.call(op, operands_of(op, *stack));
  if (encoder.has_compound()) {
    call_sparse(op, encoder, *stack, borrowed.outermost());
    return;
  }
  if (sized || (op.trusted != nullptr && op.trusted(operands_of(op, *stack)))) {
    send_in_place(op, encoder, *stack);
    return;
  }
  const bool dynamic = op.dynamic || (op.masks && encoder.has_mask());
  if (!dynamic) {
    if (const Plan* plan = PlanCache::get().find(encoder.key(), borrowed.outermost())) {
      send_planned(op, encoder, *plan, *stack);
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
      send_planned(op, encoder, *plan, *stack);
      first.wait();
      return;
    }
  }
  if (Session::capturing() && !dynamic && op.plain) {
    if (const std::shared_ptr<Plan> plan = probe(op, operands_of(op, *stack))) {
      PlanCache::get().insert(encoder.key(), plan);
      send_planned(op, encoder, *plan, *stack);
      return;
    }
  }
  call_and_wait(op, encoder, *stack);
}

}  // namespace sing::client
