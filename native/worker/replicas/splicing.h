// Executes no call whose results exist: see Note [Replicas].
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "worker/exec/decode.h"
#include "worker/exec/outputs.h"
#include "worker/replicas/postponed.h"
#include "worker/replicas/rendezvous.h"

namespace sing {

// The record of a call, decoded.
struct CallRecordView {
  const Operator& op;
  uint32_t number;  // of the operator
  const ExpectedReturns& expected;
  std::span<const std::byte> arguments;  // as they are encoded
  uint8_t flags;

  bool is_request() const { return (flags & kRequest) != 0; }
};

class Splicing {
 public:
  Splicing(State& state, Postponed::Performer& performer) : state_(state), performer_(performer) {}

  // To be called when torch's settings have changed, of which the results of operators depend.
  void forget_settings() noexcept { settings_ = {}; }
  // Executes a call that overwrites whole storages with zeros: they take no memory until they are
  // changed, as each rank has some of its own until others can be given its own. Returns false if
  // it is not such a call.
  bool make_zeros(const CallRecordView& record, const Call& call);
  // Derives the contents of the results. Returns false if they are unknown. To be called before the
  // operands are materialised.
  bool derive(const CallRecordView& record, const Call& call, bool deterministic);
  // After that, for a request: fills in what it returns, if that is known. See Note [Known results]
  // in requested.h.
  bool expect(ExpectedReturns& expected);
  // After that: returns true if there are versions of all results, or the call is postponed. It is
  // then not to be executed, but its results to be placed.
  bool find(const CallRecordView& record, Call& call);
  void place_operands(Call& call);
  void place_results(const ExpectedReturns& expected);
  // If it returned false: true if the call is to wait while others become owners of what was made
  // for them. Until then, what they keep cannot be freed.
  bool lets_others();
  // After that: whether the call is to be executed, and with whom.
  Rendezvous::Outcome meet(const CallRecordView& record, const Call& call);
  // After that, if the call was executed: what its results are.
  void note(const CallRecordView& record, const Call& call);
  // After that, if it was executed together.
  void give(const Call& call);

  // True if a call waits for other sessions, or for its results from them.
  bool waits() const noexcept { return waits_; }
  // True if others have executed its next record: see Rendezvous::given().
  bool given() const { return waits_ && rendezvous().given(session()); }
  // True if the turn is to continue.
  bool ready() const { return !waits_ || rendezvous().ready(session()); }
  void end_waiting() noexcept;

 private:
  // A result, or a changed operand.
  struct Made {
    ContentId id;  // of no bytes: there is no version
    bool result;
    uint32_t which;  // item or operand
  };

  Rendezvous& rendezvous() const noexcept { return state_.storages.replicas()->rendezvous(); }
  uint32_t session() const noexcept { return state_.storages.session(); }
  const ContentId& settings(bool deterministic);
  bool put_operands(const Call& call, size_t arguments_at);
  bool put_aliases(const ExpectedReturns& expected);
  std::optional<ContentId> result_id(uint64_t number, const Geometry& geometry,
                                     uint64_t bytes) const;
  // Numbers a result, in the same way whether the client knew its geometry or not.
  static uint64_t number_of(size_t which, size_t item) noexcept { return which << 32 | item; }
  // False if an operator has returned one storage as several results, which then change together.
  static bool has_own_storage(const Slot& slot) {
    constexpr size_t kUsers = 2;  // the slot and the result
    return slot.storage.use_count() <= kUsers;
  }
  ContentId operand_id(uint32_t operand, uint64_t bytes) const;
  Rendezvous::Outcome outcome_of(const CallRecordView& record, const Call& call);
  bool rehearse(const CallRecordView& record, const Call& call);
  bool are_distinct(const ExpectedReturns& expected);
  void forget_expected();
  void note_requested(const CallRecordView& record, const Call& call);
  std::shared_ptr<Postponed> postpone(const CallRecordView& record, const Call& call);
  void check(const CallRecordView& record, const Call& call);

  State& state_;
  Postponed::Performer& performer_;
  ContentId settings_;  // and number of threads; none: unknown
  uint64_t calls_ = 0;
  bool waits_ = false;
  std::unordered_set<ContentId> rehearsed_;  // calls that have not failed on small tensors
  // Of the current call.
  ContentId call_;
  Writer text_;
  std::vector<Made> made_;
  std::vector<ContentId> ids_;
  std::vector<Share> shares_;
  std::shared_ptr<Postponed> postponed_;
  bool whole_ = true;  // every result has a content
};

}  // namespace sing
