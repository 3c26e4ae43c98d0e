// An asynchronous device over host memory, for builds of torch without CUDA: what a GPU does that
// the CPU does not, and stricter. It is torch's backend PrivateUse1.
//
// Note [Asynchronous device]. Operators are put into the queue of a stream, whose thread executes
// them later with torch's CPU kernels on the same memory. So the host runs ahead, up to the length
// of a queue, and reads old bytes if it does not wait. The geometry of results comes from torch's
// kernels for the meta device; an operator without one waits for the stream, as operators whose
// results depend on data do on a GPU. What a GPU executes wrongly without a word is noted as a
// violation: memory given up while another stream uses it, and host memory that changes before its
// copy has run. Memory given up is overwritten, in the order of its stream.
//
// Device time is simulated: a task begins when the tasks before it, the events that it waits for
// and its own launch are past, and lasts as long as its cost says. The threads are never ahead of
// that time, and `lost_ns` does not depend on how loaded the machine is as long as they keep up.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "worker/exec/failures.h"

namespace sing::test {

struct DeviceOptions {
  uint64_t capacity = uint64_t{1} << 30;
  uint64_t context_bytes = 0;     // of the capacity, from the first use of the device on
  uint64_t copy_bytes_per_s = 0;  // 0: copies take no device time
  uint64_t kernel_ns = 0;         // device time of each operator
  uint64_t pinning_ns = 0;        // host time for which pinned memory is made
  size_t queue = 1024;            // launches that a stream holds; further ones wait
  bool poison = true;             // overwrite memory that was given up, and targets of copies
  // The position of the record that this thread executes, or none. With it, scripted faults and
  // refusals befall records alone.
  std::function<std::optional<uint64_t>()> record = {};
};

// What happens to a process that is killed: see AsyncDevice::kill().
class Killed : public EndOfRun {
 public:
  Killed() : EndOfRun("killed") {}
};

// A fault of a kernel. It comes late, with a later call, and stays: every call fails from then on.
struct DeviceFault {
  // How the first call reports it. Later calls raise an AcceleratorError, as CUDA does.
  enum class Form : uint8_t { accelerator, error, standard };
  int32_t code = 710;
  std::string text = "CUDA error: device-side assert triggered";
  Form form = Form::accelerator;
  std::optional<uint64_t> record = {};  // to which the kernel belongs
};

constexpr size_t kStreams = 5;  // the default stream, and a pool

// Up to which task of each stream something comes later.
using Order = std::array<uint64_t, kStreams>;

// An allocation of the device.
struct DeviceBlock : std::enable_shared_from_this<DeviceBlock> {
  class AsyncDevice* owner = nullptr;
  std::byte* data = nullptr;
  uint64_t bytes = 0;             // of the request
  uint64_t taken = 0;             // rounded up
  size_t stream = 0;              // which reuses it
  std::map<size_t, int> pending;  // tasks of each stream that use it and were not executed
  Order last{};                   // the last task of each stream that uses it
  std::vector<size_t> recorded;   // streams that recordStream() named
};
using DeviceBlockPtr = std::shared_ptr<DeviceBlock>;

// One recording of an event.
struct Mark {
  bool done = false;
  uint64_t at_ns = 0;
  Order after{};
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  std::function<void()> work;  // an exception of it is a fault of the device
  uint64_t cost_ns = 0;
  bool kernel = false;
  bool copy = false;  // between device and host
  std::vector<DeviceBlockPtr> uses;
  MarkPtr waits, marks;
  std::optional<DeviceFault> fault;
  std::optional<uint64_t> record;
  uint64_t launched_ns = 0;
};

class AsyncDevice {
 public:
  static constexpr int kDevices = 2;

  // Registers the backend at its first call.
  static AsyncDevice& at(int index = 0);
  static c10::Device device(int index = 0) {
    return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
  }

  // --- what a test scripts and sees
  // Begins anew, as another process does: faults, counts, violations and kept memory are gone.
  void reset(const DeviceOptions& options = {});
  // The nth operator launched from now on faults when it is executed; 0 is the next one.
  void fail_kernel(uint64_t nth, DeviceFault fault = {});
  // The nth allocation from now on, and `times` - 1 after it, find no memory.
  void refuse_allocation(uint64_t nth, uint64_t times = 1);
  // The nth call of the driver from now on, and all after it, throw Killed: so the process does
  // nothing more, in the middle of whatever it does.
  void kill(uint64_t nth);
  bool killed();
  // The record that has lost the device, and those that were refused memory.
  std::optional<uint64_t> faulted();
  std::vector<uint64_t> refused();
  // Memory that other processes take.
  void occupy(uint64_t bytes);
  // The default stream, or those of the pool, stop before their next task until they are released.
  void hold(bool on);
  void hold_pool(bool on);

  bool lost();
  std::vector<std::string> violations();
  uint64_t used();       // bytes in use
  uint64_t kept();       // bytes freed and kept for the next tensors
  uint64_t launched();   // operators
  uint64_t copied();     // copies between device and host
  uint64_t queued();     // tasks of all streams that have not been executed
  uint64_t queued_ns();  // device time of those
  uint64_t now_ns();     // device time up to which the default stream has executed
  bool has_context();
  // Device time for which a stream executed no operator, between its first task and its last.
  uint64_t lost_ns(size_t stream = 0);

  // --- the driver: every call throws once the device is lost
  void use();  // makes the context
  // Waits for a place in the queue.
  void launch(size_t stream, Task task);
  void synchronize(size_t stream);
  void synchronize();
  void synchronize(const MarkPtr& mark);
  bool idle(size_t stream);
  bool done(const MarkPtr& mark);
  MarkPtr record(size_t stream);
  void wait(size_t stream, const MarkPtr& mark);
  size_t next_pooled();
  DeviceBlockPtr allocate(uint64_t bytes, size_t stream);
  void free(const DeviceBlockPtr& block) noexcept;
  void record_stream(const DeviceBlockPtr& block, size_t stream);
  void empty_cache();
  std::pair<uint64_t, uint64_t> memory();  // free and total
  // Throws the error of a lost device.
  void check();
  void note_violation(const std::string& what);
  uint64_t copy_ns(uint64_t bytes) const;
  uint64_t kernel_ns() const { return options_.kernel_ns; }
  uint64_t pinning_ns() const { return options_.pinning_ns; }
  bool poisons() const { return options_.poison; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Line {
    std::deque<Task> queue;
    bool running = false;
    Order after{};            // its own entry: the number of its tasks
    uint64_t running_ns = 0;  // of the running task
    uint64_t end_ns = 0;
    uint64_t lost_ns = 0;
  };

  explicit AsyncDevice(int index);
  [[noreturn]] void serve(size_t stream);
  void execute(Lock& lock, size_t stream, Task task);
  void lose(DeviceFault fault);
  void check(Lock& lock);
  std::optional<uint64_t> record() const {
    return options_.record ? options_.record() : std::nullopt;
  }
  // Whether what was scripted may happen to what this thread does.
  bool befalls() const { return !options_.record || options_.record(); }
  void push(Lock& lock, size_t stream, Task task);
  void keep(const DeviceBlockPtr& block);
  bool settled(const DeviceBlock& block, size_t except) const;
  void release_kept(Lock& lock);
  bool stopped(size_t stream) const { return stream == 0 ? held_ : pool_held_; }
  bool empty(size_t stream) const {
    return lines_[stream].queue.empty() && !lines_[stream].running;
  }
  // True if it executes nothing more.
  bool over() const { return lost_ || calls_ > killed_at_; }

  const int index_;
  DeviceOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Line, kStreams> lines_;
  std::optional<DeviceFault> lost_;
  bool reported_ = false;
  bool held_ = false, pool_held_ = false;
  bool context_ = false;
  uint64_t launched_ = 0, copied_ = 0;
  std::map<uint64_t, DeviceFault> faults_;  // by the number of the launch
  uint64_t calls_ = 0, killed_at_ = UINT64_MAX;
  std::vector<uint64_t> refused_;
  uint64_t refuse_from_ = UINT64_MAX, refuse_until_ = 0, allocations_ = 0;
  uint64_t used_ = 0, kept_bytes_ = 0, occupied_ = 0;
  std::vector<DeviceBlockPtr> kept_, deferred_;
  std::vector<std::string> violations_;
  size_t pooled_ = 0;
};

}  // namespace sing::test
