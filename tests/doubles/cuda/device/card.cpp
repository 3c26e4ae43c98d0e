#include "device/card.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <mutex>
#include <sstream>

namespace sing_double {
namespace {

constexpr uint64_t kGranule = 2 << 20;  // of the driver's allocations

uint64_t rounded(uint64_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

std::string read(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// When a process started; 0 if it has ended: a zombie holds no memory of a card.
uint64_t started(int pid) {
  const std::string stat = read("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(stat.substr(name_end + 1));
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X") return 0;
  for (int number = 4; number <= 22 && fields >> field; ++number) {
  }
  return strtoull(field.c_str(), nullptr, 10);
}

// Excludes all other threads and processes while a card's state is used.
class Locked {
 public:
  explicit Locked(Card& card) : card_(card), guard_(mutex()) { set(F_WRLCK); }
  ~Locked() { set(F_UNLCK); }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  void set(short type) {
    struct flock lock = {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    while (fcntl(card_.fd, F_SETLKW, &lock) != 0) {
      if (errno != EINTR) abort();
    }
  }

  Card& card_;
  std::lock_guard<std::mutex> guard_;
};

void release_ended(State& state) {
  for (Slot& slot : state.slots) {
    if (slot.pid && started(slot.pid) != slot.started) slot = {};
  }
}

Slot* own_slot(State& state) {
  for (Slot& slot : state.slots) {
    if (slot.pid == getpid()) return &slot;
  }
  for (Slot& slot : state.slots) {
    if (!slot.pid) {
      slot = {getpid(), started(getpid()), 0, 0};
      return &slot;
    }
  }
  abort();  // more processes than kProcessesMax
}

uint64_t total(const State& state) {
  uint64_t sum = state.outside;
  for (const Slot& slot : state.slots) sum += slot.context + slot.memory;
  return sum;
}

std::vector<Card>* read_cards() {
  auto* found = new std::vector<Card>;
  std::istringstream lines(read(directory() + "/cards"));
  std::string line;
  while (!directory().empty() && std::getline(lines, line)) {
    std::istringstream fields(line);
    Card card;
    fields >> card.uuid >> card.capacity >> card.context >> std::ws;
    std::getline(fields, card.name);
    const std::string number = std::to_string(found->size());
    card.node = directory() + "/dev/nvidia" + number;
    card.fd = open((directory() + "/state" + number).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (card.fd < 0 || ftruncate(card.fd, sizeof(State)) != 0) abort();
    void* mapped = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, card.fd, 0);
    if (mapped == MAP_FAILED) abort();
    card.state = static_cast<State*>(mapped);
    found->push_back(card);
  }
  return found;
}

}  // namespace

const std::string& directory() {
  static auto* found = new std::string(getenv("CUDA_DOUBLE") ? getenv("CUDA_DOUBLE") : "");
  return *found;
}

std::vector<Card>& cards() {
  static std::vector<Card>* found = read_cards();
  return *found;
}

std::vector<int> visible_cards() {
  const char* given = getenv("CUDA_VISIBLE_DEVICES");
  std::vector<int> found;
  const int count = static_cast<int>(cards().size());
  if (!given) {
    for (int card = 0; card < count; ++card) found.push_back(card);
    return found;
  }
  std::istringstream names(given);
  std::string name;
  while (std::getline(names, name, ',')) {
    int named = -1;
    if (!name.empty() && name.find_first_not_of("0123456789") == std::string::npos) {
      named = atoi(name.c_str());
    } else if (!name.empty()) {
      for (int card = 0; card < count; ++card) {
        if (cards()[card].uuid.rfind(name, 0) == 0) named = card;
      }
    }
    if (named < 0 || named >= count) break;  // like CUDA: what follows is ignored
    found.push_back(named);
  }
  return found;
}

bool open_nodes(const char* what) {
  std::vector<std::string> paths = {directory() + "/dev/nvidiactl"};
  for (const Card& card : cards()) paths.push_back(card.node);
  for (const std::string& path : paths) {
    if (open(path.c_str(), O_RDWR | O_CLOEXEC) < 0) {
      note("denied", what);
      return false;
    }
  }
  note(what);
  return true;
}

bool charge(int number, int64_t context, int64_t memory) {
  Card& card = cards()[number];
  const Locked locked(card);
  release_ended(*card.state);
  Slot& slot = *own_slot(*card.state);
  const int64_t granules =
      memory < 0 ? -static_cast<int64_t>(rounded(-memory)) : static_cast<int64_t>(rounded(memory));
  const uint64_t before = total(*card.state) + card.state->hidden;
  if (context + granules > 0 && before + context + granules > card.capacity) return false;
  slot.context += context;
  slot.memory += granules;
  return true;
}

uint64_t used(int number) {
  Card& card = cards()[number];
  const Locked locked(card);
  release_ended(*card.state);
  return total(*card.state);
}

std::vector<Use> uses(int number) {
  Card& card = cards()[number];
  const Locked locked(card);
  release_ended(*card.state);
  std::vector<Use> found;
  for (const Slot& slot : card.state->slots) {
    if (slot.pid) found.push_back({slot.pid, slot.context + slot.memory});
  }
  return found;
}

bool fire(int number, int fault, uint32_t times) {
  Card& card = cards()[number];
  const Locked locked(card);
  if (card.state->fired[fault] >= times) return false;
  ++card.state->fired[fault];
  return true;
}

void note(const char* what, const std::string& details) {
  if (directory().empty()) return;
  std::string command = read("/proc/self/cmdline");
  for (char& each : command) {
    if (each == '\0' || each == '\t' || each == '\n') each = ' ';
  }
  command.erase(command.find_last_not_of(' ') + 1);
  const std::string line =
      std::string(what) + "\t" + std::to_string(getpid()) + "\t" + command + "\t" + details + "\n";
  const int fd =
      open((directory() + "/log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0 || write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) abort();
  close(fd);
}

}  // namespace sing_double
