// The operations for which leave() waits, see Note [Detaching] in session.h.
#pragma once

#include "client/log/session.h"

namespace sing::client {

// Scope guard: undoes ++engaged_ in the destructor.
class Session::Engagement {
 public:
  explicit Engagement(Session& session) noexcept : session_(session) {}
  ~Engagement() { session_.disengage(); }
  Engagement(const Engagement&) = delete;
  Engagement& operator=(const Engagement&) = delete;

 private:
  Session& session_;
};

}  // namespace sing::client
