// What the requests of sessions have returned.
//
// Note [Known results]. A client knows what an operator returns once it has called it with such
// operands; its first call is a request. The ranks of a job make the same ones, in their first
// steps. By then, another rank may have overwritten what its own call returned or changed, and the
// request would be executed again, beside what the first rank has: the whole state of an optimizer.
// So the geometry of what a request has returned is kept, by the id of the call. The same request
// of another session is then a call with known results: they are found or postponed, and the answer
// describes them.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "worker/exec/outputs.h"
#include "worker/replicas/content.h"

namespace sing {

// Of the last calls; any thread.
class Requested {
 public:
  // The numbers of the results mean nothing.
  using Results = std::shared_ptr<const ExpectedReturns>;

  void note(const ContentId& call, ExpectedReturns results);
  // Returns null if the call is unknown.
  Results find(const ContentId& call) const;

 private:
  static constexpr size_t kCallsMax = 4096;
  mutable std::mutex mutex_;  // everything below
  std::unordered_map<ContentId, Results> calls_;
  std::deque<ContentId> order_;
};

}  // namespace sing
