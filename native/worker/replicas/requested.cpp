#include "worker/replicas/requested.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "worker/replicas/splicing.h"

namespace sing {

namespace {

Geometry geometry_of(const at::Tensor& tensor) {
  Geometry geometry;
  geometry.dtype = tensor.scalar_type();
  geometry.flags = tensor_flags(tensor);
  geometry.offset = tensor.storage_offset();
  geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  geometry.strides.assign(tensor.strides().begin(), tensor.strides().end());
  return geometry;
}

// True if an answer describes it, too.
bool has_other_geometry(const Operand& operand) {
  return operand.written &&
         (operand.tensor.sizes() != c10::IntArrayRef(operand.geometry.sizes) ||
          operand.tensor.strides() != c10::IntArrayRef(operand.geometry.strides) ||
          operand.tensor.storage_offset() != operand.geometry.offset);
}

// A request has more numbers for a list than are needed.
bool fits(const ExpectedReturns::Return& known, const ExpectedReturns::Return& numbers) {
  return known.list == numbers.list && known.compound == numbers.compound &&
         (known.list ? known.count <= numbers.count : known.count == numbers.count);
}

// Without the numbers that were not needed.
ExpectedReturns compacted(const ExpectedReturns& results) {
  ExpectedReturns made;
  for (ExpectedReturns::Return one : results.returns) {
    const auto items = results.of(one);
    one.first = static_cast<uint32_t>(made.items.size());
    made.items.insert(made.items.end(), items.begin(), items.end());
    made.returns.push_back(one);
  }
  return made;
}

}  // namespace

void Requested::note(const ContentId& call, ExpectedReturns results) {
  const std::lock_guard lock(mutex_);
  if (!calls_.emplace(call, std::make_shared<const ExpectedReturns>(std::move(results))).second) {
    return;
  }
  order_.push_back(call);
  if (order_.size() <= kCallsMax) return;
  calls_.erase(order_.front());
  order_.pop_front();
}

Requested::Results Requested::find(const ContentId& call) const {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? nullptr : found->second;
}

void Splicing::forget_expected() {
  std::erase_if(made_, [](const Made& one) { return one.result; });
  whole_ = false;
}

bool Splicing::expect(ExpectedReturns& expected) {
  const Requested::Results known = state_.storages.replicas()->requested().find(call_);
  if (!known || !std::ranges::equal(known->returns, expected.returns, fits)) return false;
  whole_ = true;
  for (size_t i = 0; i < expected.returns.size(); ++i) {
    auto& one = expected.returns[i];
    one.count = known->returns[i].count;
    for (uint32_t k = 0; k < (one.list ? one.count : 1); ++k) {
      Expected& item = expected.items[one.first + k];
      const Expected& result = known->items[known->returns[i].first + k];
      whole_ &= item.kind == result.kind;
      if (item.kind != Expected::Kind::tensor || !whole_) continue;
      item.bytes = result.bytes;
      item.geometry = result.geometry;
      const auto id = result_id(number_of(i, k), item.geometry, item.bytes);
      whole_ &= id.has_value();
      if (id) made_.push_back({*id, true, one.first + k});
    }
  }
  if (!whole_) forget_expected();
  return whole_;
}

void Splicing::note_requested(const CallRecordView& record, const Call& call) {
  Storages& storages = state_.storages;
  ExpectedReturns results = record.expected;
  bool known = std::ranges::none_of(call.operands, has_other_geometry);
  const auto note_one = [&](Expected& item, uint64_t number, const at::Tensor& tensor) {
    if (item.kind != Expected::Kind::tensor || item.id >= storages.all().size()) return false;
    if (!tensor.defined() || tensor.layout() != c10::kStrided) return false;
    Slot& slot = storages.all()[item.id];
    if (!slot.storage || !slot.storage.is_alias_of(tensor.storage())) return false;
    item.geometry = geometry_of(tensor);
    item.bytes = slot.bytes;
    const auto id = result_id(number, item.geometry, item.bytes);
    if (!id || !has_own_storage(slot)) return false;
    storages.note_content(slot, *id);
    return true;
  };
  for (size_t i = 0; i < results.returns.size(); ++i) {
    auto& one = results.returns[i];
    const auto items = std::span(results.items).subspan(one.first, one.count);
    const c10::IValue& result = call.stack[i];
    if (!one.list) {
      known &= result.isTensor() && !items.empty();
      if (items.empty() || items[0].kind == Expected::Kind::none) continue;
      known &= note_one(items[0], number_of(i, 0), tensor_of(result));
    } else if (is_tensor_list(result)) {
      const auto list = result.toListRef();
      known &= list.size() <= items.size();
      one.count = static_cast<uint32_t>(std::min(list.size(), items.size()));
      for (uint32_t k = 0; k < one.count; ++k) {
        known &= note_one(items[k], number_of(i, k), tensor_of(list[k]));
      }
    } else {
      known = false;
    }
  }
  if (known) storages.replicas()->requested().note(call_, compacted(results));
}

}  // namespace sing
