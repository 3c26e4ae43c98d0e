#include "worker/exec/repetition.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>

#include "oplog/compound.h"

namespace sing {

namespace {

[[noreturn]] void refuse() { throw CorruptLog("an answer of another request"); }

// Reads a tensor or an alias of an answer, after its tag. Throws CorruptLog if the call has no
// such result.
Expected get_answered(Reader& in, Tag tag, std::span<const Expected> numbers, State& state) {
  Expected answered;
  answered.id = in.get<uint32_t>();
  if (tag == Tag::tensor) answered.bytes = in.get<uint64_t>();
  answered.geometry = get_geometry(in);
  if (!in.ok()) refuse();
  if (tag == Tag::alias) {
    answered.kind = Expected::Kind::alias;
    state.storages.at(answered.id);
    return answered;
  }
  answered.kind = Expected::Kind::tensor;
  const bool known = std::any_of(numbers.begin(), numbers.end(), [&](const Expected& number) {
    return number.kind == Expected::Kind::tensor && number.id == answered.id;
  });
  if (!known || answered.bytes > Storages::kBytesMax ||
      answered.geometry.storage_bytes() > answered.bytes) {
    refuse();
  }
  return answered;
}

uint64_t size_of(State& state, uint32_t id) {
  const auto& slots = state.storages.all();
  return id < slots.size() ? slots[id].bytes : 0;
}

// Copies the part that both have: every dimension from its start.
void copy_overlap(const at::Tensor& from, const at::Tensor& to) {
  if (!from.defined() || from.dim() != to.dim()) return;
  at::Tensor source = from, target = to;
  for (int64_t i = 0; i < to.dim(); ++i) {
    const int64_t size = std::min(from.size(i), to.size(i));
    source = source.narrow(i, 0, size);
    target = target.narrow(i, 0, size);
  }
  target.copy_(source);
}

bool same_sizes(const at::Tensor& tensor, const Geometry& geometry) {
  return tensor.defined() && tensor.scalar_type() == geometry.dtype &&
         tensor.sizes() == c10::IntArrayRef(geometry.sizes);
}

}  // namespace

Repetition::Repetition(State& state, const Call& call, std::span<const std::byte> answer)
    : state_(state), call_(call), in_(answer) {
  for (const Operand& operand : call.operands) {
    bytes_before_.push_back(state.storages.at(operand.id).bytes);
  }
}

void Repetition::bind(const ExpectedReturns& expected) {
  for (size_t i = 0; i < expected.returns.size(); ++i) {
    output(expected.of(expected.returns[i]), call_.stack[i]);
  }
}

template <class T>
void Repetition::number(bool fits, T made) {
  diverged_ |= !fits || in_.get<T>() != made;
}

void Repetition::output(Numbers numbers, const c10::IValue& result) {
  const Tag tag = in_.get<Tag>();
  switch (tag) {
    case Tag::none:
      return;
    case Tag::undefined:
    case Tag::tensor:
    case Tag::alias:
      return tensor(numbers, tensor_of(result), tag);
    case Tag::list: {
      const uint32_t count = in_.get_count(1);
      const bool made = is_tensor_list(result);
      diverged_ |= !made || result.toListRef().size() != count;
      for (uint32_t k = 0; k < count; ++k) {
        const bool there = made && k < result.toListRef().size();
        const at::Tensor item = there ? tensor_of(result.toListRef()[k]) : at::Tensor();
        tensor(numbers.subspan(std::min<size_t>(k, numbers.size())), item, in_.get<Tag>());
      }
      return;
    }
    case Tag::compound:
      return compound(numbers, result);
    case Tag::integer:
      return number<int64_t>(result.isInt(), result.isInt() ? result.toInt() : 0);
    case Tag::real:
      return number<double>(result.isDouble(), result.isDouble() ? result.toDouble() : 0);
    case Tag::boolean:
      return number<uint8_t>(result.isBool(), result.isBool() && result.toBool());
    case Tag::complex:
      in_.get<double>();
      in_.get<double>();
      return;
    default:
      refuse();
  }
}

void Repetition::tensor(Numbers numbers, at::Tensor result, Tag tag) {
  if (tag == Tag::undefined) {
    diverged_ |= result.defined();
    return;
  }
  if (tag != Tag::tensor && tag != Tag::alias) refuse();
  const Expected to = get_answered(in_, tag, numbers, state_);
  if (result.defined()) {
    check_strided(result);
    if (result.device() != state_.device) result = result.to(state_.device);
  }
  diverged_ |= !same_sizes(result, to.geometry);
  if (tag == Tag::alias) {
    place_alias(to, result);
  } else {
    place(to, result);
  }
}

bool Repetition::is_bound(const at::Tensor& tensor) const {
  return std::any_of(bound_.begin(), bound_.end(), [&](const at::Tensor& bound) {
    return bound.storage().is_alias_of(tensor.storage());
  });
}

void Repetition::place(const Expected& to, const at::Tensor& result) {
  Storages& storages = state_.storages;
  if (same_sizes(result, to.geometry) && lies_as(result, to, state_.device) &&
      aliased_operand(call_, result) == nullptr && !is_bound(result)) {
    storages.bind(to.id, result.storage(), to.bytes);
    bound_.push_back(result);
    return;
  }
  // The answer comes from the client, which could claim any size.
  if (!result.defined() || to.bytes > result.storage().nbytes()) storages.enforce(true);
  storages.allocate(to.id, to.bytes);
  Slot& slot = storages.at(to.id);
  copy_overlap(result, make_tensor(storages.use(slot), to.geometry));
  Storages::revive(slot);
}

void Repetition::place_alias(const Expected& to, const at::Tensor& result) {
  Storages& storages = state_.storages;
  const uint64_t bytes = to.geometry.storage_bytes();
  if (storages.at(to.id).bytes < bytes) {  // an operand that did not grow this time
    storages.enforce(true);
    storages.resize(to.id, bytes);
  }
  Slot& slot = storages.at(to.id);
  if (!result.defined() || slot.life == Slot::Life::lost) return;
  const c10::Storage& storage = storages.use(slot);
  if (storage.is_alias_of(result.storage())) return;
  storages.touch(slot);
  copy_overlap(result, make_tensor(storage, to.geometry));
}

void Repetition::compound(Numbers numbers, const c10::IValue& result) {
  const Compound answered = get_compound(in_);
  if (!in_.ok()) refuse();
  const bool sparse = result.isTensor() && result.toTensor().defined() &&
                      result.toTensor().layout() == answered.layout;
  const Parts made = sparse ? parts_of(result.toTensor()) : Parts();
  std::vector<std::pair<Tag, Expected>> parts;
  bool same = sparse && result.toTensor().sizes() == c10::IntArrayRef(answered.sizes);
  for (size_t i = 0; i < answered.parts(); ++i) {
    const Tag tag = in_.get<Tag>();
    if (tag != Tag::tensor && tag != Tag::alias) refuse();
    // A part of an operand may have grown in place: its storage has the new size already.
    parts.emplace_back(tag, get_answered(in_, tag, numbers, state_));
    same = same && same_sizes(made[i], parts.back().second.geometry);
  }
  diverged_ |= !same;
  const auto cause = std::make_shared<const std::string>(
      "an operator whose sparse result has another size when it is computed again");
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& [tag, to] = parts[i];
    if (!same) {
      const uint64_t bytes = tag == Tag::tensor ? to.bytes : to.geometry.storage_bytes();
      state_.storages.lose(to.id, cause, std::max(bytes, size_of(state_, to.id)));
    } else if (tag == Tag::alias) {
      place_alias(to, made[i]);
    } else {
      place(to, made[i]);
    }
  }
}

void Repetition::fit_operands() {
  struct Answered {
    uint16_t argument, element;
    uint64_t bytes;
    Geometry geometry;
  };
  std::vector<Answered> answered;
  const uint32_t count = in_.get_count(8);
  for (uint32_t i = 0; in_.ok() && i < count; ++i) {
    Answered each{in_.get<uint16_t>(), in_.get<uint16_t>(), in_.get<uint64_t>(), {}};
    each.geometry = get_geometry(in_);
    if (each.bytes > Storages::kBytesMax || each.geometry.storage_bytes() > each.bytes) refuse();
    answered.push_back(std::move(each));
  }
  if (!in_.ok()) refuse();
  Storages& storages = state_.storages;
  for (size_t i = 0; i < call_.operands.size(); ++i) {
    const Operand& operand = call_.operands[i];
    if (!operand.written || operand.part) continue;
    const auto found = std::find_if(answered.begin(), answered.end(), [&](const Answered& each) {
      return each.argument == operand.argument && each.element == operand.element;
    });
    const bool changed = found != answered.end();
    const Geometry& geometry = changed ? found->geometry : operand.geometry;
    const uint64_t bytes = changed ? found->bytes : bytes_before_[i];
    const at::Tensor made = operand.tensor;
    if (storages.at(operand.id).bytes == bytes && same_sizes(made, geometry) &&
        made.strides() == c10::IntArrayRef(geometry.strides) &&
        made.storage_offset() == geometry.offset) {
      continue;
    }
    diverged_ |= !same_sizes(made, geometry);
    if (bytes > storages.at(operand.id).bytes) storages.enforce(true);
    storages.allocate(operand.id, bytes);
    Slot& slot = storages.at(operand.id);
    copy_overlap(made, make_tensor(storages.use(slot), geometry));
    Storages::revive(slot);
  }
}

void lose_recorded(State& state, const Call& call, const ExpectedReturns& expected,
                   std::span<const std::byte> answer,
                   const std::shared_ptr<const std::string>& cause) {
  Reader in(answer);
  const std::function<void(std::span<const Expected>)> skip = [&](std::span<const Expected> of) {
    const Tag tag = in.get<Tag>();
    if (tag == Tag::tensor || tag == Tag::alias) {
      const Expected to = get_answered(in, tag, of, state);
      const uint64_t needed = to.geometry.storage_bytes();
      if (tag == Tag::tensor) {
        state.storages.lose(to.id, cause, to.bytes);
      } else if (needed > size_of(state, to.id)) {
        state.storages.lose(to.id, cause, needed);
      }
    } else if (tag == Tag::list) {
      const uint32_t count = in.get_count(1);
      for (uint32_t k = 0; k < count; ++k) skip(of);
    } else if (tag == Tag::compound) {
      const Compound compound = get_compound(in);
      for (size_t k = 0; in.ok() && k < compound.parts(); ++k) skip(of);
    } else if (tag == Tag::integer || tag == Tag::real) {
      in.get_bytes(8);
    } else if (tag == Tag::boolean) {
      in.get_bytes(1);
    } else if (tag == Tag::complex) {
      in.get_bytes(16);
    } else if (tag != Tag::none && tag != Tag::undefined) {
      refuse();
    }
    if (!in.ok()) refuse();
  };
  for (const auto& one : expected.returns) skip(expected.of(one));
  const uint32_t count = in.get_count(8);
  for (uint32_t i = 0; in.ok() && i < count; ++i) {
    const auto argument = in.get<uint16_t>(), element = in.get<uint16_t>();
    const auto bytes = in.get<uint64_t>();
    get_geometry(in);
    for (const Operand& operand : call.operands) {
      if (operand.argument == argument && operand.element == element && !operand.part) {
        state.storages.lose(operand.id, cause, bytes);
      }
    }
  }
  if (!in.ok()) refuse();
}

}  // namespace sing
