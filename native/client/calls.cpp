#include "client/calls.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <c10/core/DispatchKeySet.h>

#include "client/encode.h"

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

void send_in_place(Operator& op, Encoder& encoder, Stack& stack) {
  for (size_t i = 0; i < op.returns; ++i) encoder.record().put(Tag::none);
  Session::get().append(RecordKind::call, encoder.record().view(), {}, encoder.flags());
  finish(op, stack, Results(op.returns));
}

// Builds planned outputs and writes them to the record.
class Emitter {
 public:
  explicit Emitter(Encoder& encoder) : encoder_(encoder), out_(encoder.record()) {}

  c10::IValue output(const Output& planned) {
    out_.put(planned.tag);
    switch (planned.tag) {
      case Tag::tensor: {
        Slot* slot = Session::get().allocate(planned.bytes, false);
        at::Tensor result = make_tensor(make_storage(slot), planned.geometry);
        out_.put<uint32_t>(slot->id);
        out_.put<uint64_t>(planned.bytes);
        put_geometry(out_, planned.geometry);
        results_.push_back(result);
        return result;
      }
      case Tag::alias: {
        const at::Tensor& owner = planned.source >= 0
                                      ? *encoder_.tensors()[static_cast<size_t>(planned.source)]
                                      : results_[static_cast<size_t>(-1 - planned.source)];
        out_.put<uint32_t>(slot_of(owner)->id);
        put_geometry(out_, planned.geometry);
        results_.push_back(make_tensor(owner.storage(), planned.geometry));
        return results_.back();
      }
      case Tag::list: {
        c10::List<at::Tensor> list;
        out_.put<uint32_t>(static_cast<uint32_t>(planned.items.size()));
        for (const Output& item : planned.items) list.push_back(output(item).toTensor());
        return list;
      }
      case Tag::undefined:
        results_.emplace_back();
        return at::Tensor();
      default:
        return {};
    }
  }

 private:
  Encoder& encoder_;
  Writer& out_;
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
  Emitter emitter(encoder);
  Results fresh(op.returns);
  for (size_t i = 0; i < op.returns; ++i) {
    fresh[i] = emitter.output(plan.outputs.empty() ? Output{} : plan.outputs[i]);
  }
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
  Request(Operator& op, Encoder& encoder) : op_(op), encoder_(encoder) {
    Writer& out = encoder.record();
    for (size_t i = 0; i < op.returns; ++i) {
      const c10::TypePtr& type = op.schema.returns()[i].type();
      if (op.aliases[i] >= 0) {
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
      case Tag::integer:
        rememberable_ = false;
        return in.get<int64_t>();
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
    Request request(op, encoder);
    results = request.run(operands_of(op, stack), plan);
  }
  if (plan != nullptr && !op.dynamic && op.plain) PlanCache::get().insert(encoder.key(), plan);
  finish(op, stack, std::move(results));
}

// Encoders keep their buffers; a shape function of torch may call operators while one is in use.
class Borrowed {
 public:
  Borrowed() {
    if (depth >= pool.size()) pool.push_back(std::make_unique<Encoder>());
    encoder_ = pool[depth++].get();
  }
  ~Borrowed() { --depth; }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Encoder& operator*() { return *encoder_; }

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
  if (op.trusted || sized) {
    send_in_place(op, encoder, *stack);
    return;
  }
  const bool dynamic = op.dynamic || (op.masks && encoder.has_mask());
  if (!dynamic) {
    if (const auto plan = PlanCache::get().find(encoder.key())) {
      send_planned(op, encoder, *plan, *stack);
      return;
    }
  }
  if (op.structured) {
    call_structured(op, dynamic ? std::span<const std::byte>() : encoder.key(), *stack);
    return;
  }
  if (op.shape != nullptr && !dynamic) {
    auto plan = std::make_shared<Plan>();
    if (op.shape(operands_of(op, *stack), *plan)) {
      PlanCache::get().insert(encoder.key(), plan);
      send_planned(op, encoder, *plan, *stack);
      return;
    }
  }
  call_and_wait(op, encoder, *stack);
}

}  // namespace sing::client
