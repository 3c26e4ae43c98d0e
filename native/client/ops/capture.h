// A stretch of records that is kept to be executed later, as often as wanted: what torch calls a
// CUDA graph.
//
// Note [Captures]. While one is made, calls are kept and not sent, as a GPU captures and does not
// execute. Whatever waits for the device is refused, as it is there. What has a shape that nobody
// knows yet is executed on zeros of the operands' geometry, to learn it.
//
// Kept calls name storages by number, so none of these may get another owner: storages that a
// capture names are pinned, and a pinned one that is freed lives on. Those that a capture itself
// made and let go it uses again, as torch's private pools do.
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

 private:
  friend class Session;
  struct Record {
    uint8_t flags;
    std::vector<std::byte> payload;
  };

  const Settings settings_;  // that hold for its calls
  std::vector<Record> calls_;
  std::unordered_set<Slot*> pinned_;
  std::vector<Slot*> idle_;  // made here, and freed
};

// While it lives, this thread's operators are executed although a capture is made, and leave the
// default generator as it was.
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
