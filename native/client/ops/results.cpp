#include "client/ops/results.h"

#include "client/log/session.h"
#include "client/ops/capture.h"
#include "client/ops/tensors.h"

namespace sing::client {

namespace {

using torch::jit::Stack;

void pin_operands(const Encoder& encoder) {
  for (const at::Tensor* tensor : encoder.tensors()) Session::get().pin(slot_of(*tensor));
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

}  // namespace

c10::ArrayRef<c10::IValue> operands_of(const Operator& op, const Stack& stack) {
  return c10::ArrayRef<c10::IValue>(stack.data() + (stack.size() - op.operands), op.operands);
}

void finish(const Operator& op, Stack& stack, Results&& fresh) {
  const size_t base = stack.size() - op.operands;
  for (size_t i = 0; i < op.returns; ++i) {
    if (op.aliases[i] >= 0) fresh[i] = stack[base + static_cast<size_t>(op.aliases[i])];
  }
  torch::jit::drop(stack, op.operands);
  for (c10::IValue& value : fresh) stack.push_back(std::move(value));
}

void send_in_place(const Operator& op, Encoder& encoder) {
  for (size_t i = 0; i < op.returns; ++i) encoder.record().put(Tag::none);
  if (Session::capturing()) pin_operands(encoder);
  Session::get().append(RecordKind::call, encoder.record().view(), {}, encoder.flags());
}

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

Results send_planned(const Operator& op, Encoder& encoder, const Plan& plan) {
  static const Output nothing;
  Emitter emitter(encoder, op.returns > 1);
  Results fresh(op.returns);
  for (size_t i = 0; i < op.returns; ++i) {
    fresh[i] = emitter.output(plan.outputs.empty() ? nothing : plan.outputs[i]);
  }
  if (Session::capturing()) pin_operands(encoder);
  Session::get().append(RecordKind::call, encoder.record().view(), {}, encoder.flags());
  return fresh;
}

}  // namespace sing::client
