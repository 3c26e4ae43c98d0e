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

// True if all operands of one element of the lists have one shape, or are numbers, and all have
// floating dtypes, one for each element.
bool fit_by_elements(const Call& call) {
  c10::SmallVector<const Geometry*, 16> first;
  for (const Operand& operand : call.operands) {
    const Geometry& geometry = operand.geometry;
    if (!c10::isFloatingType(geometry.dtype) || (geometry.flags & kMarks) != 0) return false;
    if (operand.element >= first.size()) first.resize(operand.element + 1);
    const Geometry*& other = first[operand.element];
    if (other == nullptr && operand.argument == 0) other = &geometry;
    if (other == nullptr) return false;
    if (geometry.sizes.empty() && !operand.changed) continue;
    if (geometry.dtype != other->dtype || geometry.sizes != other->sizes) return false;
  }
  return true;
}

// Marks the place of an operand's storage when it was added to what the call makes.
constexpr uint32_t kAdded = uint32_t{1} << 31;
uint32_t place_of(const Slot& slot) { return slot.place & ~kAdded; }

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

bool Splicing::make_zeros(const CallRecordView& record, const Call& call) {
  if (!record.op.zeroes || record.is_request() || !call.compounds.empty()) return false;
  Storages& storages = state_.storages;
  for (const Operand& operand : call.operands) {
    const Geometry& geometry = operand.geometry;
    if (!geometry.is_contiguous() || geometry.offset != 0 ||
        geometry.storage_bytes() != storages.at(operand.id).bytes) {
      return false;
    }
  }
  for (const Operand& operand : call.operands) {
    storages.allocate(operand.id, storages.at(operand.id).bytes);
  }
  return true;
}

bool Splicing::derive(const CallRecordView& record, const Call& call, bool deterministic) {
  if (!record.op.determined || !call.compounds.empty() || call.generators || state_.pending)
    return false;
  const ContentId& settings = this->settings(deterministic);
  text_.clear();
  text_.put(settings);
  text_.put<uint64_t>(record.flags & kGradients);
  text_.put_string(record.op.full_name);
  text_.put<uint64_t>(record.arguments.size());
  const size_t arguments_at = text_.size();
  text_.put_bytes(record.arguments.data(), record.arguments.size());
  ++calls_;
  if (!put_operands(call, arguments_at) || !put_aliases(record.expected)) return false;
  call_ = hash(text_.view(), Hashed::call);
  made_.clear();
  whole_ = !record.is_request();
  for (uint32_t i = 0; i < call.operands.size(); ++i) {
    const Operand& operand = call.operands[i];
    if (!operand.changed) continue;
    Slot& slot = state_.storages.at(operand.id);
    if ((slot.place & kAdded) != 0 || (slot.bytes == 0 && !record.is_request())) continue;
    made_.push_back({operand_id(slot.place, slot.bytes), false, i});
    slot.place |= kAdded;
  }
  if (record.is_request()) return true;
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

bool Splicing::find(const CallRecordView& record, Call& call) {
  if (!whole_ || made_.empty()) return false;
  ids_.clear();
  shares_.clear();
  for (const Made& one : made_) ids_.push_back(one.id);
  Replicas& replicas = *state_.storages.replicas();
  const size_t found = replicas.find(ids_, state_.storages.session(), shares_);
  const auto empty = static_cast<size_t>(std::count(ids_.begin(), ids_.end(), kNothing));
  if (found != 0 && state_.storages.checks_splicing()) check(record, call);
  if (found != 0 && found + empty == made_.size()) return true;
  if (replicas.executed_by_another(call_, state_.storages.session())) {
    postponed_ = postpone(record, call);
    if (postponed_) return true;
  }
  shares_.clear();
  if (record.is_request()) forget_expected();
  return false;
}

// Executes the call on operands of one element each, once for all calls that differ only in shapes
// and numbers. Returns false if it fails, which it may not do in the memory of others.
bool Splicing::rehearse(const CallRecordView& record, const Call& call) {
  constexpr size_t kRehearsedMax = 4096;
  constexpr uint64_t kElementBytesMax = 16;  // of any dtype: operands may share a storage
  text_.clear();
  text_.put_string(record.op.full_name);
  text_.put<uint64_t>(record.arguments.size());
  std::vector<c10::Storage> storages;
  Call copy = call;
  for (Operand& operand : copy.operands) {
    Geometry& geometry = operand.geometry;
    const uint32_t place = place_of(state_.storages.at(operand.id));
    text_.put(operand.argument);
    text_.put(geometry.dtype);
    text_.put<uint64_t>(geometry.sizes.size());
    text_.put(place);
    std::fill(geometry.sizes.begin(), geometry.sizes.end(), 1);
    std::fill(geometry.strides.begin(), geometry.strides.end(), 1);
    geometry.offset = 0;
  }
  const ContentId kind = hash(text_.view(), Hashed::call);
  if (rehearsed_.contains(kind)) return true;
  for (const Operand& operand : copy.operands) {
    const uint32_t place = place_of(state_.storages.at(operand.id));
    if (place < storages.size()) {
      storages.push_back(storages[place]);
      continue;
    }
    storages.push_back(fresh_storage(state_.storages.allocator(), kElementBytesMax));
    bytes_of(storages.back(), 0, kElementBytesMax).zero_();
  }
  Decoder::materialise(copy, storages);
  try {
    performer_.perform(record.op, copy, record.expected, record.flags);
  } catch (const std::exception&) {
    return false;
  }
  if (rehearsed_.size() >= kRehearsedMax) rehearsed_.clear();
  rehearsed_.insert(kind);
  return true;
}

bool Splicing::lets_others() {
  if (!rendezvous().gives()) return false;
  if (given()) throw WrongSplice("the results of a call that others have executed are missing");
  waits_ = true;
  return true;
}

Rendezvous::Outcome Splicing::meet(const CallRecordView& record, const Call& call) {
  const Rendezvous::Outcome outcome = outcome_of(record, call);
  const bool waits = outcome == Rendezvous::Outcome::waits;
  if (waits_ && !waits) end_waiting();
  waits_ = waits;
  return outcome;
}

Rendezvous::Outcome Splicing::outcome_of(const CallRecordView& record, const Call& call) {
  constexpr auto kAlone = Rendezvous::Outcome::alone;
  if (!record.op.by_elements || record.is_request() || !whole_) return kAlone;
  Storages& storages = state_.storages;
  c10::SmallVector<Share*, 16> changed;
  uint64_t bytes = 0;
  for (const Made& one : made_) {
    if (one.result) return kAlone;
    Slot& slot = storages.at(call.operands[one.which].id);
    if (slot.filled != slot.bytes || slot.bytes == 0) return kAlone;
    if (!slot.share) continue;
    changed.push_back(&slot.share);
    bytes += slot.bytes;
  }
  if (bytes == 0 || bytes < state_.limits.together_bytes || !fit_by_elements(call) ||
      !rehearse(record, call)) {
    return kAlone;
  }
  // While it waits, others may change the bytes.
  for (const Made& one : made_) {
    storages.finish_saving(storages.at(call.operands[one.which].id));
  }
  return rendezvous().meet(session(), call_, changed, ids_, storages.checks_splicing());
}

void Splicing::give(const Call& call) {
  for (const Made& one : made_) {
    const Slot& slot = state_.storages.at(call.operands[one.which].id);
    TORCH_CHECK(slot.share && slot.share.id() == one.id, "internal: no version was made");
  }
  rendezvous().give(ids_);
}

void Splicing::end_waiting() noexcept {
  waits_ = false;
  rendezvous().end_waiting(session());
}

// Returns null if an operand's bytes may change before the call is executed.
std::shared_ptr<Postponed> Splicing::postpone(const CallRecordView& record, const Call& call) {
  Postponed::Record made;
  std::vector<uint32_t> source_at(call.operands.size());
  for (uint32_t i = 0; i < call.operands.size(); ++i) {
    const Operand& operand = call.operands[i];
    Slot& slot = state_.storages.at(operand.id);
    const uint32_t place = place_of(slot);
    if (place == i) {
      source_at[i] = static_cast<uint32_t>(made.sources.size());
      Postponed::Source source{
          .share = {}, .call = slot.postponed, .made = slot.made, .bytes = slot.bytes};
      source.zeros = !slot.in_memory();
      if (!slot.share && slot.storage && slot.content) {
        state_.storages.note_content(slot, ContentId(slot.content));
      }
      source.share = slot.share;
      made.sources.push_back(std::move(source));
    }
    Postponed::Source& source = made.sources[source_at[place]];
    source.changed |= operand.changed;
    if (!source.share && !source.call && !source.zeros && slot.bytes != 0 &&
        !operand.overwrites(slot.bytes)) {
      return nullptr;
    }
    made.source_of.push_back(source_at[place]);
  }
  for (const Made& one : made_) {
    made.made.push_back(
        {one.result, one.result
                         ? one.which
                         : source_at[place_of(state_.storages.at(call.operands[one.which].id))]});
  }
  made.op = record.number;
  made.flags = record.flags;
  made.call = call;
  made.expected = record.expected;
  auto postponed = std::make_shared<Postponed>(state_, performer_, std::move(made));
  return postponed->depth() <= Postponed::kDepthMax ? postponed : nullptr;
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
  for (uint32_t i = 0; i < made_.size() && !made_[i].result; ++i) {
    Slot& slot = storages.at(call.operands[made_[i].which].id);
    if (shares_[i]) {
      storages.splice(slot, std::move(shares_[i]));
    } else {
      storages.postpone(slot, postponed_, i, made_[i].id);
    }
  }
}

void Splicing::place_results(const ExpectedReturns& expected) {
  Storages& storages = state_.storages;
  for (uint32_t i = 0; i < made_.size(); ++i) {
    const Made& one = made_[i];
    if (!one.result) continue;
    const Expected& item = expected.items[one.which];
    if (one.id == kNothing) {
      storages.bind(item.id, fresh_storage(storages.allocator(), 0), 0);
      storages.at(item.id).content = kNothing;
    } else if (shares_[i]) {
      storages.bind(item.id, std::move(shares_[i]));
    } else {
      storages.bind_postponed(item.id, item.bytes, postponed_, i, one.id);
    }
  }
  shares_.clear();
  storages.replicas()->count_squashed(postponed_ != nullptr);
  postponed_.reset();
  if (waits_) end_waiting();
}

void Splicing::note(const CallRecordView& record, const Call& call) {
  Storages& storages = state_.storages;
  storages.replicas()->note_executed(call_, storages.session());
  if (!are_distinct(record.expected)) return;
  for (const Made& one : made_) {
    if (one.result) {
      Slot& slot = storages.at(record.expected.items[one.which].id);
      if (has_own_storage(slot)) storages.note_content(slot, one.id);
      continue;
    }
    Slot& slot = storages.at(call.operands[one.which].id);
    storages.note_content(slot,
                          record.is_request() ? operand_id(place_of(slot), slot.bytes) : one.id);
  }
  if (record.is_request()) note_requested(record, call);
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

// Executes the call on copies of its operands, and compares.
void Splicing::check(const CallRecordView& record, const Call& call) {
  Storages& storages = state_.storages;
  std::vector<c10::Storage> copies;
  for (const Operand& operand : call.operands) {
    Slot& slot = storages.at(operand.id);
    if (place_of(slot) < copies.size()) {
      copies.push_back(copies[place_of(slot)]);
      continue;
    }
    copies.push_back(fresh_storage(storages.allocator(), slot.bytes));
    if (slot.in_memory()) {
      copy_bytes(storages.use(slot), copies.back());
    } else if (slot.bytes != 0) {
      bytes_of(copies.back(), 0, slot.bytes).zero_();
    }
  }
  Call copy = call;
  Decoder::materialise(copy, copies);
  performer_.perform(record.op, copy, record.expected, record.flags);
  const auto results = results_of(copy, record.expected, state_.device);
  for (size_t i = 0; i < made_.size(); ++i) {
    if (!shares_[i]) continue;
    const uint32_t which = made_[i].which;
    const c10::Storage& made =
        made_[i].result ? results[which] : copies[place_of(storages.at(call.operands[which].id))];
    storages.check_splice(shares_[i].storage(),
                          {static_cast<const std::byte*>(made.data()), made.nbytes()},
                          record.op.full_name);
  }
}

}  // namespace sing
