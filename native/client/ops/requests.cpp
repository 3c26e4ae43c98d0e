#include "client/ops/requests.h"

#include <algorithm>
#include <unordered_map>

#include "client/log/session.h"
#include "client/ops/capture.h"
#include "client/ops/compound.h"
#include "client/ops/results.h"
#include "client/ops/tensors.h"
#include "client/torch/generators.h"

namespace sing::client {

namespace {

using torch::jit::Stack;

constexpr uint32_t kListItemsMax = 256;         // results of an operator that returns an unknown
                                                // number of tensors
constexpr uint64_t kRoom = uint64_t{64} << 20;  // bytes requested before a request is retried

// True for Tensor and Optional[Tensor].
bool is_tensor(const c10::TypePtr& type) {
  const auto optional = type->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : type)->kind() == c10::TypeKind::TensorType;
}

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
      } else if (is_tensor(type)) {
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

  // Returns the results, and the plan for the next call with such operands (null: do not remember).
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
    Session::get().cover_use();
    if (!rememberable_) plan.reset();
    return results;
  }

 private:
  // True for results of operators of sparse tensors; an operand that such an operator changes may
  // get other parts.
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

  // True if equal geometry of the operands does not imply equal geometry of the results.
  bool depends_on_data() const {
    return op_.dynamic || (op_.masks && encoder_.has_mask()) || !(op_.plain || op_.counts) ||
           encoder_.has_compound();
  }

  // A device's allocator may run out of memory before the accounts do. The agent may have free
  // memory: retry once, unless the operator may have changed something already.
  std::vector<std::byte> send() {
    Session& session = Session::get();
    try {
      return session.request(RecordKind::call, encoder_.record().view(), encoder_.flags(),
                             depends_on_data());
    } catch (const c10::OutOfMemoryError&) {
      if (op_.schema.is_mutable()) throw;
      uint64_t bytes = kRoom;
      for (const at::Tensor* tensor : encoder_.tensors()) bytes += 2 * tensor->nbytes();
      if (!session.try_reserve(bytes)) throw;
    }
    return session.request(RecordKind::call, encoder_.record().view(), encoder_.flags(),
                           depends_on_data());
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
      // The operand has grown in place.
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

// Makes zeros in the geometry of an operand. The client never reads them, so they take memory only
// in the worker.
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
  if (value.isGenerator() && value.toGenerator().defined()) return new_generator(-1);
  if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
  c10::List<std::optional<at::Tensor>> list;
  for (const c10::IValue& item : value.toListRef()) {
    const c10::IValue zeros = imitation(item, made);
    list.push_back(zeros.isTensor() ? std::optional(zeros.toTensor()) : std::nullopt);
  }
  return list;
}

}  // namespace

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

}  // namespace sing::client
