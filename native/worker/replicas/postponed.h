// Calls that were not executed because their results are expected to be replaced unread.
//
// Note [Postponed]. The first rank that executes an optimizer's step overwrites what is needed only
// between two of its operators (the parameters after weight decay, the root of the second moments)
// before the next rank comes: for these there are no versions, and that rank would execute the
// calls again, up to the last one, whose results exist. So a call that another session has executed
// with the same operands is postponed: its results have their content ids, and memory is counted
// for them, but nothing is computed. Usually they are overwritten or freed before anything but
// another such call uses them. Otherwise the call is executed then, with its operands as they were:
// it owns their versions until then.
//
// A snapshot needs the bytes: the main thread executes all postponed calls before it parks.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/exec/decode.h"
#include "worker/exec/outputs.h"

namespace sing {

class Postponed {
 public:
  // More calls that follow from each other are not postponed.
  static constexpr uint32_t kDepthMax = 64;

  // Calls operators for the session that has postponed a call.
  class Performer {
   public:
    // The call's operands are on its stack; its results are left there.
    virtual void perform(const Operator& op, Call& call, const ExpectedReturns& expected,
                         uint8_t flags) = 0;

   protected:
    ~Performer() = default;
  };

  // The storage of an operand before the call; one for all operands that share it.
  struct Source {
    Share share;                      // a version
    std::shared_ptr<Postponed> call;  // or a result of another call
    uint32_t made = 0;
    uint64_t bytes = 0;
    bool changed = false;
    bool zeros = false;  // or zeros; otherwise the call overwrites it
  };

  struct Record {
    uint32_t op;
    uint8_t flags;
    Call call;
    ExpectedReturns expected;
    std::vector<Source> sources;
    std::vector<uint32_t> source_of;  // by operands
    // What the call makes: a source that it changes, or an item that it returns.
    struct Made {
      bool result;
      uint32_t which;
    };
    std::vector<Made> made;
  };

  Postponed(State& state, Performer& performer, Record record);
  ~Postponed() { forget(); }
  Postponed(const Postponed&) = delete;
  Postponed& operator=(const Postponed&) = delete;

  uint32_t depth() const noexcept { return depth_; }
  // Executes the call unless that was done, and returns what it made, once. May throw what
  // operators throw; the call can be executed again then.
  c10::Storage take(uint32_t made);

 private:
  void execute();
  void forget() noexcept;

  State& state_;
  Performer& performer_;
  Record record_;
  uint32_t depth_ = 1;
  uint32_t users_ = 0;  // postponed calls with an operand that this one makes
  std::vector<c10::Storage> made_;
};

}  // namespace sing
