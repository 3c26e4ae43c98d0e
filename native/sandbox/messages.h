// Messages from the first process in a sandbox to the launcher outside.
#pragma once

#include <string>
#include <string_view>

#include "sandbox/system.h"

namespace sing::sandbox {

enum class Event : char {
  kNothing = 0,    // the other end is closed
  kRunning = 'r',  // the main process runs; carries a pidfd of it
  kEnded = 'e',    // the main process has ended; the text is its wait status
  kFailed = 'f',   // there will be no main process; the text says why
};

struct Received {
  Event event = Event::kNothing;
  std::string text;
  Fd fd;
};

// Sends one datagram; returns false if the receiver is gone.
bool send_event(int socket, Event event, std::string_view text, int fd = -1);

Received receive_event(int socket);

}  // namespace sing::sandbox
