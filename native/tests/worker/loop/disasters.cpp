// Random programs on the asynchronous device, on which everything goes wrong: kernels fault late,
// memory is refused, workers are killed at any call of the driver, also while they recover. What
// the programs have read, and all that they leave, is what the CPU computes for the same log
// without the records that failed.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <map>
#include <random>
#include <set>

#include "tests/check.h"
#include "tests/device/async_device.h"
#include "tests/harness.h"
#include "tests/worker/exec/random_program.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr int kSteps = 60;
constexpr int kDisastersMax = 10;  // that an agent makes in one program
constexpr int kAttemptsMax = 50;   // to start a worker
constexpr const char* kAsserted = "CUDA error: device-side assert triggered";

const DeviceFault kHardware{214, "CUDA error: uncorrectable ECC error encountered"};

struct Given {
  uint64_t position;
  Answer answer;
};

struct Counts {
  int programs = 0, snapshots = 0, killed = 0, passing = 0, skipped = 0, refused = 0, repeated = 0;
  int without_room = 0, starts = 0;
};

// An agent that makes disasters, and does after each of them what agents do.
class Agent {
 public:
  // `history`: what has happened to the workers.
  Agent(Host& host, uint64_t seed, Counts& counts, std::string& history)
      : host_(host), random_(seed), counts_(counts), history_(history) {
    options_.queue = 64;
    options_.record = executed_record;
    device_.reset(options_);
    host.options.device = AsyncDevice::device();
    host.options.limits.piece_bytes = 4096;
    host.on_over = [this] { replace(); };
    host.start();
  }
  ~Agent() {
    if (taking_.joinable()) taking_.join();
  }

  void step() {
    if (host_.over() || device_.killed()) replace();
    switch (random_() % 16) {
      case 0:
      case 1:
      case 2:
        if (!taking_.joinable()) take(random_() % 4 == 0);
        return;
      case 3:
      case 4:
      case 5:
        return finish();
      case 6:
        if (taking_.joinable()) host_.session().hurry();
        return;
      case 7:
        if (!taking_.joinable()) host_.session().trim();
        return;
      case 8:
      case 9:
        return arm();
      case 10:
        if (disasters_ < kDisastersMax && random_() % 2 == 0) {
          ++disasters_;
          replace(true);
        }
        return;
      default:
        return;
    }
  }
  void finish() {
    if (!taking_.joinable()) return;
    taking_.join();
    if (host_.over() || device_.killed() || lost_) return replace();
    if (!taken_) throw CheckFailed("a snapshot failed: " + failure_);
    ++counts_.snapshots;
    if (random_() % 5 == 0) return taken_.reset();  // the agent died before it was recorded
    committed_ = std::move(taken_);
    host_.commit(position_);
  }
  // To be called at the end. Returns the records that failed, and whether for lack of memory.
  std::map<uint64_t, bool> failed() {
    finish();
    host_.stop_taking(taking_);
    note_device();
    WorkerPage& page = host_.worker();
    EXPECT_EQ(page.memory_unlisted.load(), uint64_t{0});
    for (uint64_t i = 0; i < page.memory_failures.load(); ++i) {
      const uint64_t position = page.memory_failed[i].load();
      if (!refused_.erase(position)) throw CheckFailed("a record failed that had all its memory");
      failed_[position] = true;
      ++counts_.refused;
    }
    counts_.repeated += static_cast<int>(refused_.size());
    return failed_;
  }

 private:
  void take(bool stop) {
    taken_.reset();
    lost_ = 0;
    taking_ = std::thread([this, stop] {
      try {
        uint64_t position = 0;
        taken_ = std::make_unique<File>(host_.snapshot(&position, stop));
        position_ = position;
      } catch (const DeviceLost& lost) {
        lost_ = lost.code;
      } catch (const std::exception& error) {
        failure_ = error.what();
      }
    });
  }

  void arm() {
    if (disasters_ >= kDisastersMax) return;
    ++disasters_;
    switch (random_() % 3) {
      case 0:
        // An error that only a program can cause does not befall a record that was careful before.
        return device_.fail_kernel(random_() % 20, careful_until_ ? kHardware : DeviceFault());
      case 1:
        return device_.refuse_allocation(random_() % 20, 1 + random_() % 6);
      default:
        return device_.kill(random_() % 150);
    }
  }

  void note_device() {
    EXPECT_EQ(device_.violations(), std::vector<std::string>());
    for (const uint64_t record : device_.refused()) refused_.insert(record);
  }

  // The policy of kernelproxy/agent/workers/crash_policy.py.
  void judge(bool killed) {
    const uint64_t consumed = host_.worker().consumed.load();
    history_ += "\n        at " + std::to_string(consumed) + " of " + std::to_string(host_.head()) +
                ": " + (killed ? "killed" : host_.ended_by()) + ", careful until " +
                std::to_string(careful_until_);
    const bool alone = consumed < careful_until_;
    if (!alone) careful_until_ = 0;
    if (killed) {
      ++counts_.killed;
    } else if (host_.loss() || lost_) {
      if ((host_.loss() ? host_.loss()->code : lost_.load()) == kHardware.code) {
        ++counts_.passing;
        return;
      }
      if (!alone) {
        careful_until_ = std::min(consumed + 1, host_.head());
        ++counts_.passing;
        return;
      }
      EXPECT_EQ(device_.faulted().value_or(UINT64_MAX), consumed);
      host_.options.skip[consumed] = {kAsserted};
      failed_[consumed] = false;
      ++counts_.skipped;
    } else if (host_.ended_by().find("out of memory") != std::string::npos) {
      ++counts_.without_room;
    } else {
      throw CheckFailed("the worker ended: " + host_.ended_by());
    }
  }

  void replace(bool killed = false) {
    killed |= device_.killed();
    host_.stop_taking(taking_);
    taken_.reset();
    judge(killed || host_.ended_by() == Killed().what());
    note_device();
    lost_ = 0;
    host_.options.careful_until = careful_until_;
    for (int attempt = 0; attempt < kAttemptsMax; ++attempt) {
      device_.reset(options_);
      if (random_() % 3 == 0) arm();
      ++counts_.starts;
      try {
        return host_.start(committed_ ? committed_->fd() : -1);
      } catch (const Killed&) {
      } catch (const c10::OutOfMemoryError&) {
      }
      ++host_.options.epoch;
    }
    throw CheckFailed("no worker starts");
  }

  AsyncDevice& device_ = AsyncDevice::at();
  DeviceOptions options_;
  Host& host_;
  Random random_;
  Counts& counts_;
  std::string& history_;
  std::thread taking_;
  std::unique_ptr<File> taken_, committed_;
  uint64_t position_ = 0;
  std::string failure_;
  std::atomic<int32_t> lost_{0};  // the code of a loss that a snapshot noticed
  uint64_t careful_until_ = 0;
  int disasters_ = 0;
  std::set<uint64_t> refused_;  // records that found no memory, for a moment at least
  std::map<uint64_t, bool> failed_;
};

// Runs a program to its end, and returns what it was answered on the way and there.
template <class Between>
std::vector<Given> run(Host& host, uint64_t seed, std::vector<uint64_t>& faults, Between between) {
  std::vector<Given> given;
  host.on_answer = [&](uint64_t position, const Answer& answer) {
    given.push_back({position, answer});
  };
  Program program(host, seed, /*faulty=*/true);
  for (int i = 0; i < kSteps; ++i) {
    program.step();
    between();
  }
  program.result();
  faults = program.faults();
  return given;
}

std::string text_of(const Given& given) {
  const std::string where = "the answer at " + std::to_string(given.position) + ": ";
  const Answer& answer = given.answer;
  if (answer.ok()) return where + std::to_string(answer.bytes.size()) + " bytes";
  return where + "kind " + show(answer.kind()) + " of " + answer.operation() + " at " +
         std::to_string(answer.position()) + ": " + answer.message();
}

void compare(const std::vector<Given>& found, const std::vector<Given>& expected,
             const std::map<uint64_t, bool>& failed) {
  for (size_t i = 0; i < std::min(found.size(), expected.size()); ++i) {
    const Answer &is = found[i].answer, &should = expected[i].answer;
    bool same = found[i].position == expected[i].position && is.status == should.status;
    if (same && is.ok()) same = is.bytes == should.bytes;
    if (same && !is.ok()) {
      same = is.position() == should.position() && is.operation() == should.operation();
      const auto cause = failed.find(is.position());
      if (cause == failed.end() || should.kind() == ErrorKind::lost_operand) {
        same &= is.kind() == should.kind() && is.message() == should.message();
      } else if (cause->second) {
        same &= is.kind() == ErrorKind::out_of_memory;
      } else {
        same &= is.kind() == ErrorKind::runtime && is.message().starts_with(kAsserted);
      }
    }
    if (!same) throw CheckFailed(text_of(found[i]) + "; expected: " + text_of(expected[i]));
  }
  EXPECT_EQ(found.size(), expected.size());
}

void survive(uint64_t seed, Counts& counts) {
  std::string history;
  try {
    std::vector<uint64_t> faults;
    std::vector<Given> found;
    std::map<uint64_t, bool> failed;
    {
      Host host(size_t{64} << 20);
      Agent agent(host, seed * 31 + 7, counts, history);
      found = run(host, seed, faults, [&] { agent.step(); });
      failed = agent.failed();
    }
    for (const auto& [position, memory] : failed) {
      history +=
          "\n        failed at " + std::to_string(position) + (memory ? ": memory" : ": fault");
    }
    EXPECT_EQ(AsyncDevice::at().used(), uint64_t{0});
    Host host(size_t{64} << 20);
    for (const auto& [position, memory] : failed) {
      const bool faults_always = std::find(faults.begin(), faults.end(), position) != faults.end();
      if (!memory && !faults_always) throw CheckFailed("a wrong record was blamed");
    }
    for (const uint64_t position : faults) failed.emplace(position, false);
    for (const auto& [position, memory] : failed) host.options.skip[position] = {"skipped"};
    host.start();
    compare(found, run(host, seed, faults, [] {}), failed);
    ++counts.programs;
  } catch (const std::exception& error) {
    throw CheckFailed("program " + std::to_string(seed) + ": " + error.what() + history);
  }
}

}  // namespace

// PROGRAM=seed repeats one of them.
TEST(random_programs_end_as_on_the_cpu_whatever_happens_to_device_and_worker) {
  Counts counts;
  const char* only = std::getenv("PROGRAM");
  const uint64_t first = only ? std::stoull(only) : exhaustive() ? std::random_device()() : 1;
  const uint64_t count = exhaustive() ? 10'000 : 40;
  for (uint64_t i = 0; i < count; ++i) survive(only ? first : first + i, counts);
  std::printf(
      "      %d programs from %llu on: %d workers; %d killed, %d lost their device, %d of them by "
      "a "
      "record that was skipped, %d had no room again; %d records failed for lack of memory, %d "
      "found some; %d snapshots\n",
      counts.programs, static_cast<unsigned long long>(first), counts.starts, counts.killed,
      counts.passing + counts.skipped, counts.skipped, counts.without_room, counts.refused,
      counts.repeated, counts.snapshots);
  if (only) return;
  EXPECT(counts.killed > 0 && counts.passing > 0 && counts.skipped > 0 && counts.refused > 0);
  EXPECT(counts.repeated > 0 && counts.without_room > 0 && counts.snapshots > 0);
}
