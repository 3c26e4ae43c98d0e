#include "worker/replicas/splicing.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

namespace sing {

namespace {

constexpr uint8_t kMarks = kConjugate | kNegative;
const ContentId kNothing = ContentId::zeros(0);

// True if the tensor has every byte of its storage, each once: the others would be undefined.
bool fills(const Geometry& geometry, uint64_t bytes) {
  if (geometry.offset != 0 || geometry.storage_bytes() != bytes) return false;
  if (geometry.is_contiguous()) return true;
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dimensions;
  for (size_t i = 0; i < geometry.sizes.size(); ++i) {
    if (geometry.sizes[i] != 1) dimensions.emplace_back(geometry.strides[i], geometry.sizes[i]);
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

Geometry geometry_of(const at::Tensor& tensor) {
  Geometry geometry;
  geometry.dtype = tensor.scalar_type();
  geometry.flags = tensor_flags(tensor);
  geometry.offset = tensor.storage_offset();
  geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  geometry.strides.assign(tensor.strides().begin(), tensor.strides().end());
  return geometry;
}

// Numbers a result, in the same way whether the client knew its geometry or not.
uint64_t number_of(size_t which, size_t item) { return which << 32 | item; }

}  // namespace

const ContentId& Splicing::settings(bool deterministic) {
  if (settings_) return settings_;
  text_.clear();
  text_.put<uint64_t>(static_cast<uint64_t>(at::get_num_threads()));
  text_.put<uint8_t>(deterministic);
  text_.put<uint8_t>(state_.settings.has_value());
  if (state_.settings) put_settings(text_, *state_.settings);
  return settings_ = hash(text_.view(), Hashed::call);
}

bool Splicing::derive(const CallRecordView& record, const Call& call, bool deterministic) {
  if (!record.op.determined || !call.compounds.empty() || call.generators || state_.pending)
    return false;
  const ContentId& settings = this->settings(deterministic);
  text_.clear();
  text_.put(settings);
  text_.put<uint64_t>(record.gradients);
  text_.put_string(record.op.full_name);
  text_.put<uint64_t>(record.arguments.size());
  const size_t arguments_at = text_.size();
  text_.put_bytes(record.arguments.data(), record.arguments.size());
  ++calls_;
  if (!put_operands(call, arguments_at) || !put_aliases(record.expected)) return false;
  call_ = hash(text_.view(), Hashed::call);
  made_.clear();
  whole_ = !record.request;
  // Its place is marked when it was added.
  constexpr uint32_t kAdded = uint32_t{1} << 31;
  for (uint32_t i = 0; i < call.operands.size(); ++i) {
    const Operand& operand = call.operands[i];
    if (!operand.changed) continue;
    Slot& slot = state_.storages.at(operand.id);
    if ((slot.place & kAdded) != 0 || (slot.bytes == 0 && !record.request)) continue;
    made_.push_back({operand_id(slot.place, slot.bytes), false, i});
    slot.place |= kAdded;
  }
  if (record.request) return true;
  for (size_t i = 0; i < record.expected.returns.size(); ++i) {
    const auto& one = record.expected.returns[i];
    for (uint32_t k = 0; k < one.count; ++k) {
      const Expected& item = record.expected.items[one.first + k];
      if (item.kind != Expected::Kind::tensor) continue;
      const auto id = result_id(number_of(i, k), item.geometry, item.bytes);
      whole_ &= id.has_value();
      if (id) made_.push_back({*id, true, one.first + k});
    }
  }
  return true;
}

// Replaces the numbers of the operands' storages, which differ between sessions, by what tells
// which operands share a storage, and adds the contents.
bool Splicing::put_operands(const Call& call, size_t arguments_at) {
  for (uint32_t i = 0; i < call.operands.size(); ++i) {
    const Operand& operand = call.operands[i];
    Slot& slot = state_.storages.at(operand.id);
    if (slot.call != calls_) {
      slot.call = calls_;
      slot.place = i;
    }
    text_.patch<uint32_t>(arguments_at + operand.at, slot.place);
    ContentId content;
    if (!operand.overwrites(slot.bytes)) {
      if (slot.life != Slot::Life::live) return false;
      content = state_.storages.content(slot);
      if (!content) return false;
    }
    text_.put(content);
    text_.put<uint64_t>(slot.bytes);
  }
  return true;
}

bool Splicing::put_aliases(const ExpectedReturns& expected) {
  const auto& slots = state_.storages.all();
  for (const Expected& item : expected.items) {
    if (item.kind != Expected::Kind::tensor && item.kind != Expected::Kind::alias) continue;
    const bool operand = item.id < slots.size() && slots[item.id].call == calls_;
    if (operand != (item.kind == Expected::Kind::alias)) return false;
    if (!operand) continue;
    text_.put<uint32_t>(slots[item.id].place);
    put_geometry(text_, item.geometry);
  }
  return true;
}

std::optional<ContentId> Splicing::result_id(uint64_t number, const Geometry& geometry,
                                             uint64_t bytes) const {
  if (bytes == 0) return ContentId::zeros(0);
  if (!fills(geometry, bytes)) return std::nullopt;
  c10::SmallVector<uint64_t, 16> words{call_.high,
                                       call_.low,
                                       number,
                                       bytes,
                                       static_cast<uint64_t>(geometry.dtype),
                                       static_cast<uint64_t>(geometry.flags & kMarks)};
  for (const int64_t size : geometry.sizes) words.push_back(static_cast<uint64_t>(size));
  for (const int64_t stride : geometry.strides) words.push_back(static_cast<uint64_t>(stride));
  return hash(std::as_bytes(std::span(words.data(), words.size())), Hashed::result);
}

ContentId Splicing::operand_id(uint32_t operand, uint64_t bytes) const {
  if (bytes == 0) return ContentId::zeros(0);
  return hash({call_.high, call_.low, operand, bytes}, Hashed::operand);
}

bool Splicing::find(const CallRecordView& record, Call& call, c10::function_ref<void()> execute) {
  if (record.request || !whole_ || made_.empty()) return false;
  ids_.clear();
  shares_.clear();
  for (const Made& one : made_) {
    if (one.id != kNothing) ids_.push_back(one.id);
  }
  Storages& storages = state_.storages;
  if (ids_.empty() || !storages.replicas()->find_all(ids_, storages.session(), shares_)) {
    shares_.clear();
    return false;
  }
  if (storages.checks_splicing()) check(record, call, execute);
  return true;
}

// They take memory as if the operator was executed.
void Splicing::place_operands(Call& call) {
  Storages& storages = state_.storages;
  for (Operand& operand : call.operands) {
    Slot& slot = storages.at(operand.id);
    operand.fresh |= !slot.in_memory() || slot.life == Slot::Life::lost;
    if (!operand.changed && !slot.in_memory()) storages.use(slot);
  }
  // Operands come first.
  for (size_t i = 0; i < made_.size() && !made_[i].result; ++i) {
    storages.splice(storages.at(call.operands[made_[i].which].id), std::move(shares_[i]));
  }
}

void Splicing::place_results(const ExpectedReturns& expected) {
  Storages& storages = state_.storages;
  for (size_t i = 0, share = 0; i < made_.size(); ++i) {
    const Made& one = made_[i];
    const bool versioned = one.id != kNothing;
    const size_t at = share;
    share += versioned;
    if (!one.result) continue;
    const uint32_t id = expected.items[one.which].id;
    if (versioned) {
      storages.bind(id, std::move(shares_[at]));
    } else {
      storages.bind(id, fresh_storage(storages.allocator(), 0), 0);
      storages.at(id).content = kNothing;
    }
  }
  shares_.clear();
  storages.replicas()->count_squashed();
}

void Splicing::note(const CallRecordView& record, const Call& call) {
  Storages& storages = state_.storages;
  storages.replicas()->count_executed();
  if (!are_distinct(record.expected)) return;
  for (const Made& one : made_) {
    if (one.result) {
      storages.note_content(storages.at(record.expected.items[one.which].id), one.id);
      continue;
    }
    Slot& slot = storages.at(call.operands[one.which].id);
    const uint32_t place = slot.place & ~(uint32_t{1} << 31);
    storages.note_content(slot, record.request ? operand_id(place, slot.bytes) : one.id);
  }
  if (record.request) note_requested(record, call);
}

// False if a client gave two results the same number: then the first one is not there any more.
bool Splicing::are_distinct(const ExpectedReturns& expected) {
  auto& slots = state_.storages.all();
  for (const Expected& item : expected.items) {
    if (item.kind != Expected::Kind::tensor || item.id >= slots.size()) continue;
    if (std::exchange(slots[item.id].call, calls_) == calls_) return false;
  }
  return true;
}

void Splicing::note_requested(const CallRecordView& record, const Call& call) {
  Storages& storages = state_.storages;
  const auto note_one = [&](const Expected& item, uint64_t number, const at::Tensor& tensor) {
    if (item.kind != Expected::Kind::tensor || item.id >= storages.all().size()) return;
    if (!tensor.defined() || tensor.layout() != c10::kStrided) return;
    Slot& slot = storages.all()[item.id];
    if (!slot.storage || !slot.storage.is_alias_of(tensor.storage())) return;
    const auto id = result_id(number, geometry_of(tensor), slot.bytes);
    if (id) storages.note_content(slot, *id);
  };
  for (size_t i = 0; i < record.expected.returns.size(); ++i) {
    const auto items = record.expected.of(record.expected.returns[i]);
    const c10::IValue& result = call.stack[i];
    if (!record.expected.returns[i].list) {
      if (!items.empty()) note_one(items[0], number_of(i, 0), tensor_of(result));
    } else if (is_tensor_list(result)) {
      const auto results = result.toListRef();
      for (size_t k = 0; k < std::min(results.size(), items.size()); ++k) {
        note_one(items[k], number_of(i, k), tensor_of(results[k]));
      }
    }
  }
}

// Executes the call on copies of its operands, and compares.
void Splicing::check(const CallRecordView& record, Call& call, c10::function_ref<void()> execute) {
  Storages& storages = state_.storages;
  std::vector<c10::Storage> copies;
  for (const Operand& operand : call.operands) {
    Slot& slot = storages.at(operand.id);
    const uint32_t place = slot.place & ~(uint32_t{1} << 31);
    if (place < copies.size()) {
      copies.push_back(copies[place]);
      continue;
    }
    copies.push_back(fresh_storage(storages.allocator(), slot.bytes));
    if (slot.bytes == 0) continue;
    const at::Tensor copy = bytes_of(copies.back(), 0, slot.bytes);
    if (slot.in_memory()) {
      copy.copy_(bytes_of(storages.use(slot), 0, slot.bytes));
    } else {
      copy.zero_();
    }
  }
  Decoder::materialise(call, copies);
  execute();
  const auto results = results_of(call, record.expected, state_.device);
  auto share = shares_.begin();
  for (const Made& one : made_) {
    if (one.id == kNothing) continue;
    const Slot* slot = one.result ? nullptr : &storages.at(call.operands[one.which].id);
    const c10::Storage& made =
        slot ? copies[slot->place & ~(uint32_t{1} << 31)] : results[one.which];
    storages.check_splice(*share++, {static_cast<const std::byte*>(made.data()), made.nbytes()},
                          record.op.full_name);
  }
}

}  // namespace sing
