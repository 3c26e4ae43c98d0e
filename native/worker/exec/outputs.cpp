#include "worker/exec/outputs.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace sing {

namespace {

using Kind = Expected::Kind;

Expected parse_predicted(Reader& in, Tag tag) {
  Expected expected;
  switch (tag) {
    case Tag::none:
      return expected;
    case Tag::undefined:
      expected.kind = Kind::undefined;
      return expected;
    case Tag::tensor:
      expected.kind = Kind::tensor;
      expected.id = in.get<uint32_t>();
      expected.bytes = in.get<uint64_t>();
      break;
    case Tag::alias:
      expected.kind = Kind::alias;
      expected.id = in.get<uint32_t>();
      break;
    default:
      throw CorruptLog("an output of an unknown type");
  }
  expected.geometry = get_geometry(in);
  if (expected.kind == Kind::tensor && in.ok() &&
      (expected.id >= Storages::kCountMax || expected.bytes > Storages::kBytesMax ||
       expected.geometry.storage_bytes() > expected.bytes)) {
    throw CorruptLog("an output that cannot be");
  }
  return expected;
}

// Results may be marked as conjugate or negative (vdot); the mark of a wrapped number does not
// apply to them.
constexpr uint8_t kMarks = kConjugate | kNegative;
uint8_t marks_of(const Geometry& geometry) { return geometry.flags & kMarks; }

}  // namespace

bool lies_as(const at::Tensor& tensor, const Expected& expected, c10::Device device) {
  return tensor.strides() == c10::IntArrayRef(expected.geometry.strides) &&
         tensor.storage_offset() == expected.geometry.offset &&
         tensor.storage().nbytes() == expected.bytes && tensor.device() == device &&
         (tensor_flags(tensor) & kMarks) == marks_of(expected.geometry);
}

const Operand* aliased_operand(const Call& call, const at::Tensor& tensor) {
  for (const Operand& operand : call.operands) {
    if (operand.tensor.unsafeGetTensorImpl()->unsafe_storage().is_alias_of(tensor.storage())) {
      return &operand;
    }
  }
  return nullptr;
}

void check_strided(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_quantized(),
                              "quantized tensors are not supported on a proxied device yet; keep "
                              "them on the CPU.");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided && !tensor.is_nested(),
                              "a sparse or nested result of an operator of ordinary tensors cannot "
                              "be taken over by a proxied device; run it on the CPU.");
  TORCH_CHECK(!tensor._is_zerotensor(), "internal: a result without bytes is not supported");
}

bool is_tensor_list(const c10::IValue& value) {
  if (!value.isList()) return false;
  const auto kind = value.toList().elementType()->kind();
  return kind == c10::TypeKind::TensorType || kind == c10::TypeKind::OptionalType;
}

at::Tensor tensor_of(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

namespace {

// Copies a result into a storage of its own, with the predicted layout.
void bind_copy(State& state, const Expected& expected, const at::Tensor& tensor) {
  state.storages.allocate(expected.id, expected.bytes);
  Slot& slot = state.storages.at(expected.id);
  const bool covered = tensor.nbytes() == expected.bytes;
  const Geometry& to = expected.geometry;
  make_tensor(covered ? state.storages.use_raw(slot) : state.storages.use(slot),
              {to.dtype, marks_of(to), to.offset, to.sizes, to.strides})
      .copy_(tensor, /*non_blocking=*/true);  // a seed that a kernel left on the host is small
  Storages::revive(slot);
}

// Returns true if there is a tensor to bind.
bool check_expected(const Expected& expected, const at::Tensor& tensor) {
  if (expected.kind == Kind::none) return false;
  if (expected.kind == Kind::undefined) {
    TORCH_CHECK(!tensor.defined(), "internal: a result was not expected");
    return false;
  }
  TORCH_CHECK(tensor.defined(), "internal: an expected result is undefined");
  check_strided(tensor);
  TORCH_CHECK(tensor.scalar_type() == expected.geometry.dtype &&
                  tensor.sizes() == c10::IntArrayRef(expected.geometry.sizes),
              "internal: the result is ", tensor.scalar_type(), tensor.sizes(), ", expected was ",
              expected.geometry.dtype, c10::IntArrayRef(expected.geometry.sizes));
  return true;
}

// True if the result lies in this storage as expected.
bool lies_in(const c10::Storage& storage, const Expected& expected, const at::Tensor& tensor) {
  return storage.is_alias_of(tensor.storage()) &&
         tensor.strides() == c10::IntArrayRef(expected.geometry.strides) &&
         tensor.storage_offset() == expected.geometry.offset &&
         (tensor_flags(tensor) & kMarks) == marks_of(expected.geometry);
}

void bind_one(State& state, const Call& call, const Expected& expected, const at::Tensor& tensor) {
  if (!check_expected(expected, tensor)) return;
  if (expected.kind == Kind::alias) {
    Slot& slot = state.storages.at(expected.id);
    if (expected.geometry.storage_bytes() > slot.bytes) {
      throw CorruptLog("an output reaches beyond its storage");
    }
    if (const auto& held = slot.held(); held && lies_in(held, expected, tensor)) return;
    const c10::Storage& storage = state.storages.use(slot);
    state.storages.touch(slot);
    make_tensor(storage, expected.geometry).copy_(tensor);
    return;
  }
  if (lies_as(tensor, expected, state.device) && aliased_operand(call, tensor) == nullptr) {
    state.storages.bind(expected.id, tensor.storage(), expected.bytes);
  } else {
    bind_copy(state, expected, tensor);
  }
}

// Describes the results of one call, which may share storages with operands and each other.
class Describer {
 public:
  Describer(State& state, const Call& call, Writer& answer)
      : state_(state), call_(call), answer_(answer) {}

  void tensor(const Expected& expected, const at::Tensor& result) {
    if (!result.defined()) {
      answer_.put(Tag::undefined);
      return;
    }
    check_strided(result);
    at::Tensor tensor = result;
    if (tensor.device() != state_.device) tensor = tensor.to(state_.device);
    if (const Operand* operand = aliased_operand(call_, tensor)) {
      alias(operand->id, tensor);
      return;
    }
    for (const auto& [id, storage] : bound_) {
      if (storage->is_alias_of(tensor.storage())) {
        alias(id, tensor);
        return;
      }
    }
    TORCH_CHECK(expected.kind == Kind::tensor && !is_bound(expected.id),
                "internal: a result has no number");
    state_.storages.bind(expected.id, tensor.storage(), tensor.storage().nbytes());
    bound_.emplace_back(expected.id, &tensor.storage());
    kept_.push_back(tensor);
    answer_.put(Tag::tensor);
    answer_.put<uint32_t>(expected.id);
    answer_.put<uint64_t>(tensor.storage().nbytes());
    geometry(tensor);
  }

  // Describes a result that may be sparse.
  void compound(std::span<const Expected> numbers, const at::Tensor& result) {
    if (!result.defined() || result.layout() == c10::kStrided) {
      tensor(numbers[0], result);
      return;
    }
    answer_.put(Tag::compound);
    put_compound(answer_, compound_of(result));
    const Parts parts = parts_of(result);
    for (size_t i = 0; i < parts.size(); ++i) tensor(numbers[i], parts[i]);
  }

  void value(const c10::IValue& result) {
    if (result.isInt()) {
      answer_.put(Tag::integer);
      answer_.put<int64_t>(result.toInt());
    } else if (result.isDouble()) {
      answer_.put(Tag::real);
      answer_.put<double>(result.toDouble());
    } else if (result.isBool()) {
      answer_.put(Tag::boolean);
      answer_.put<uint8_t>(result.toBool());
    } else if (result.isComplexDouble()) {
      answer_.put(Tag::complex);
      answer_.put<double>(result.toComplexDouble().real());
      answer_.put<double>(result.toComplexDouble().imag());
    } else {
      TORCH_CHECK(result.isNone(), "internal: a result of type ", result.tagKind(),
                  " is not supported");
      answer_.put(Tag::none);
    }
  }

 private:
  bool is_bound(uint32_t id) const {
    return std::any_of(bound_.begin(), bound_.end(),
                       [id](const auto& bound) { return bound.first == id; });
  }
  void alias(uint32_t id, const at::Tensor& tensor) {
    answer_.put(Tag::alias);
    answer_.put<uint32_t>(id);
    geometry(tensor);
  }

  void geometry(const at::Tensor& tensor) {
    put_geometry(answer_, tensor.scalar_type(), tensor.sizes(), tensor.strides(),
                 tensor.storage_offset(), tensor_flags(tensor) & kMarks);
  }

  State& state_;
  const Call& call_;
  Writer& answer_;
  std::vector<std::pair<uint32_t, const c10::Storage*>> bound_;
  std::vector<at::Tensor> kept_;
};

}  // namespace

void parse_outputs(Reader& in, uint16_t returns, bool request, ExpectedReturns& expected) {
  expected.returns.clear();
  expected.items.clear();
  for (uint16_t i = 0; i < returns && in.ok(); ++i) {
    const Tag tag = in.get<Tag>();
    const bool list = tag == Tag::list;
    const bool compound = request && tag == Tag::compound;
    const uint32_t count = list       ? in.get_count(request ? 4 : 1)
                           : compound ? static_cast<uint32_t>(kPartsMax)
                                      : 1;
    expected.returns.push_back(
        {list, compound, static_cast<uint32_t>(expected.items.size()), count});
    for (uint32_t item = 0; item < count && in.ok(); ++item) {
      if (!request) {
        expected.items.push_back(parse_predicted(in, list ? in.get<Tag>() : tag));
      } else if (tag == Tag::none) {
        expected.items.emplace_back();
      } else if (tag == Tag::tensor || list || compound) {
        expected.items.push_back({Kind::tensor, in.get<uint32_t>(), 0, {}});
        if (expected.items.back().id >= Storages::kCountMax) {
          throw CorruptLog("an output's number is out of range");
        }
      } else {
        throw CorruptLog("an output of an unknown type");
      }
    }
  }
  if (!in.ok()) throw CorruptLog("a call ends in the middle of its outputs");
}

void lose_outputs(State& state, const ExpectedReturns& expected,
                  const std::shared_ptr<const std::string>& cause) {
  for (const Expected& item : expected.items) {
    if (item.kind == Kind::tensor) state.storages.lose(item.id, cause, item.bytes);
  }
}

namespace {

// Calls `each` for the items of a call with predicted results.
template <class Each>
void for_each_item(const Call& call, const ExpectedReturns& expected, const Each& each) {
  for (size_t i = 0; i < expected.returns.size(); ++i) {
    const auto items = expected.of(expected.returns[i]);
    const c10::IValue& result = call.stack[i];
    if (!expected.returns[i].list) {
      if (items[0].kind != Kind::none) each(items[0], tensor_of(result));
      continue;
    }
    TORCH_CHECK(is_tensor_list(result), "internal: the result is no list of tensors");
    const auto results = result.toListRef();
    TORCH_CHECK(results.size() == items.size(), "internal: the result has ", results.size(),
                " tensors, expected were ", items.size());
    for (size_t k = 0; k < items.size(); ++k) each(items[k], tensor_of(results[k]));
  }
}

}  // namespace

void bind_predicted(State& state, const Call& call, const ExpectedReturns& expected) {
  for_each_item(call, expected, [&](const Expected& item, const at::Tensor& tensor) {
    bind_one(state, call, item, tensor);
  });
}

std::vector<c10::Storage> results_of(const Call& call, const ExpectedReturns& expected,
                                     c10::Device device) {
  std::vector<c10::Storage> storages(expected.items.size());
  for_each_item(call, expected, [&](const Expected& item, const at::Tensor& tensor) {
    if (!check_expected(item, tensor)) return;
    if (item.kind == Kind::alias) {
      for (const Operand& operand : call.operands) {
        if (operand.id != item.id) continue;
        const c10::Storage& storage = operand.tensor.storage();
        if (!lies_in(storage, item, tensor)) make_tensor(storage, item.geometry).copy_(tensor);
        return;
      }
      return;
    }
    c10::Storage& storage = storages[static_cast<size_t>(&item - expected.items.data())];
    if (lies_as(tensor, item, device) && aliased_operand(call, tensor) == nullptr) {
      storage = tensor.storage();
      return;
    }
    storage = at::empty({static_cast<int64_t>(item.bytes)}, at::kByte).storage();
    const Geometry& to = item.geometry;
    make_tensor(storage, {to.dtype, marks_of(to), to.offset, to.sizes, to.strides}).copy_(tensor);
  });
  return storages;
}

void describe(const ExpectedReturns& expected, Writer& answer) {
  for (const ExpectedReturns::Return& one : expected.returns) {
    const auto items = expected.of(one).first(one.list ? one.count : 1);
    if (one.list) {
      answer.put(Tag::list);
      answer.put<uint32_t>(one.count);
    }
    for (const Expected& item : items) {
      if (item.kind == Kind::none) {
        answer.put(Tag::none);
        continue;
      }
      const Geometry& to = item.geometry;
      answer.put(Tag::tensor);
      answer.put<uint32_t>(item.id);
      answer.put<uint64_t>(item.bytes);
      put_geometry(answer, to.dtype, to.sizes, to.strides, to.offset, marks_of(to));
    }
  }
  answer.put<uint32_t>(0);  // no operand has another geometry
}

void bind_and_describe(State& state, const Call& call, const ExpectedReturns& expected,
                       Writer& answer) {
  static const Expected unnumbered;
  Describer describe(state, call, answer);
  for (size_t i = 0; i < expected.returns.size(); ++i) {
    const auto numbers = expected.of(expected.returns[i]);
    const bool list = expected.returns[i].list;
    const c10::IValue& result = call.stack[i];
    if (result.isTensor() && expected.returns[i].compound) {
      describe.compound(numbers, result.toTensor());
    } else if (result.isTensor() && !list && numbers[0].kind == Kind::none) {
      answer.put(Tag::none);  // an operand, which the client has
    } else if (result.isTensor()) {
      describe.tensor(numbers.empty() ? unnumbered : numbers[0], result.toTensor());
    } else if (is_tensor_list(result)) {
      const auto results = result.toListRef();
      answer.put(Tag::list);
      answer.put<uint32_t>(static_cast<uint32_t>(results.size()));
      for (size_t k = 0; k < results.size(); ++k) {
        describe.tensor(k < numbers.size() ? numbers[k] : unnumbered, tensor_of(results[k]));
      }
    } else {
      describe.value(result);
    }
  }
}

}  // namespace sing
