#include "worker/replicas/postponed.h"

#include <algorithm>

namespace sing {

Postponed::Postponed(State& state, Performer& performer, Record record)
    : state_(state), performer_(performer), record_(std::move(record)) {
  for (const Source& source : record_.sources) {
    if (!source.call) continue;
    depth_ = std::max(depth_, source.call->depth_ + 1);
    ++source.call->users_;
  }
}

void Postponed::forget() noexcept {
  for (const Source& source : record_.sources) {
    if (source.call) --source.call->users_;
  }
  record_ = {};
}

c10::Storage Postponed::take(uint32_t made) {
  if (made_.empty()) execute();
  if (users_ == 0) return std::move(made_[made]);
  c10::Storage copy = fresh_storage(state_.storages.allocator(), made_[made].nbytes());
  copy_bytes(made_[made], copy);
  return copy;
}

void Postponed::execute() {
  c10::Allocator* const allocator = state_.storages.allocator();
  std::vector<c10::Storage> storages;
  for (const Source& source : record_.sources) {
    const bool fresh = !source.share && !source.call;
    c10::Storage storage;
    if (source.share) storage = source.share.storage();
    if (source.call) {
      if (source.call->made_.empty()) source.call->execute();
      storage = source.call->made_[source.made];
    }
    if (fresh || source.changed) {
      c10::Storage own = fresh_storage(allocator, source.bytes);
      if (!fresh) copy_bytes(storage, own);
      if (source.zeros) bytes_of(own, 0, source.bytes).zero_();
      storage = std::move(own);
    }
    storages.push_back(std::move(storage));
  }
  std::vector<c10::Storage> of_operands;
  for (const uint32_t source : record_.source_of) of_operands.push_back(storages[source]);
  Call call = record_.call;  // the operator takes its operands from the stack
  Decoder::materialise(call, of_operands);
  performer_.perform(state_.operators.at(record_.op), call, record_.expected, record_.flags);
  const auto results = results_of(call, record_.expected, state_.device);
  std::vector<c10::Storage> made;
  for (const auto& [result, which] : record_.made) {
    made.push_back(result ? results[which] : storages[which]);
  }
  made_ = std::move(made);
  forget();
  state_.storages.replicas()->count_recomputed();
}

}  // namespace sing
