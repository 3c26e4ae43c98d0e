// The cards of the double: what all processes share of them.
//
// The directory CUDA_DOUBLE names holds `cards` (a line for each card: UUID, bytes of memory, bytes
// of a context, name), `dev` (files that stand for those of the driver in /dev), `log` (who did
// what), and `faults` (scripted faults: see fault.h). The state of a card is in a file that all
// processes map.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sing_double {

constexpr int kProcessesMax = 64;
constexpr int kFaultsMax = 32;

// A process with a context on a card. Its memory is free when the process has ended.
struct Slot {
  int32_t pid;
  uint64_t started;  // of /proc/PID/stat: a pid may be used again
  uint64_t context, memory;
};

// Shared by all processes, and by the tests (tests/doubles/cuda/cards.py): zeros at first.
struct State {
  uint64_t outside;  // bytes that processes use that are no part of the test
  uint64_t
      hidden;  // the same, but NVML does not report them: allocations fail although it has room
  uint64_t busy_ns;  // time in which something was executed
  uint64_t launches;
  uint32_t lost;  // 1: it has fallen off the bus, for NVML
  uint32_t reserved;
  uint32_t fired[kFaultsMax];  // how often each scripted fault has happened
  Slot slots[kProcessesMax];
};

struct Card {
  std::string uuid, name, node;
  uint64_t capacity = 0, context = 0;
  int fd = -1;
  State* state = nullptr;
};

// What a process uses of a card.
struct Use {
  int pid;
  uint64_t bytes;
};

const std::string& directory();
std::vector<Card>& cards();

// Cards in the order of CUDA_VISIBLE_DEVICES.
std::vector<int> visible_cards();

// Opens the driver's files, as cuInit does. False if the process may not.
bool open_nodes(const char* what);

// Charges this process for memory. False if the card is full.
bool charge(int card, int64_t context, int64_t memory);
uint64_t used(int card);
std::vector<Use> uses(int card);

// Counts a scripted fault; true if it has happened less than `times` before.
bool fire(int card, int fault, uint32_t times);

// Appends a line to the log: what, this process, its command line, details.
void note(const char* what, const std::string& details = "");

}  // namespace sing_double
