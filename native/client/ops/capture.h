// A captured stretch of records that can be executed later, any number of times: torch's CUDA
// graph.
//
// Note [Captures]. During a capture, calls are kept and not sent, as a GPU captures and does not
// execute. Operations that wait for the device are refused, as on a GPU. A call whose result shapes
// are not known yet is executed on zeros of the operands' geometry, to learn them.
//
// Kept calls name storages by number, so these numbers must not be reused: storages that a capture
// names are pinned, and a pinned storage that is freed stays alive. A capture reuses storages that
// it made and freed itself, as torch's private pools do.
#pragma once

#include <cstddef>
#include <unordered_set>
#include <vector>

#include "client/log/session.h"

namespace sing::client {

class Capture {
 public:
  explicit Capture(const Settings& settings) : settings_(settings) {}
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  // False in a process that was forked from the one that made it.
  bool exists() const noexcept { return made_in_ == generation; }

 private:
  friend class Session;
  struct Record {
    uint8_t flags;
    std::vector<std::byte> payload;
  };

  const Settings settings_;  // in effect for its calls
  const uint32_t made_in_ = generation;
  std::vector<Record> calls_;
  std::unordered_set<Slot*> pinned_;
  std::vector<Slot*> idle_;  // made here, and freed
};

// While an instance exists, this thread's operators are executed even during a capture, and the
// default generator's state is restored at the end.
class Probing {
 public:
  explicit Probing(bool random);
  ~Probing();
  Probing(const Probing&) = delete;
  Probing& operator=(const Probing&) = delete;

 private:
  const bool random_;
};

}  // namespace sing::client
