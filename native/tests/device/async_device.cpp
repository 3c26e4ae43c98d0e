#include "tests/device/async_device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <time.h>

#include <algorithm>
#include <thread>

#include "tests/device/backend.h"
#include "worker/exec/alone.h"
#include "worker/loop/clock.h"

namespace sing::test {

namespace {

// A task that ends sooner than this ends now: a sleep takes longer.
constexpr uint64_t kSleepLeastNs = 50'000;

void sleep_until(uint64_t when_ns) {
  const timespec when{static_cast<time_t>(when_ns / 1'000'000'000),
                      static_cast<long>(when_ns % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, nullptr) != 0) {
  }
}

[[noreturn]] void raise(const DeviceFault& fault) {
  switch (fault.form) {
    case DeviceFault::Form::error:
      TORCH_CHECK(false, fault.text);
    case DeviceFault::Form::standard:
      throw std::runtime_error(fault.text);
    case DeviceFault::Form::accelerator:
      break;
  }
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, fault.code, fault.text);
}

}  // namespace

AsyncDevice& AsyncDevice::at(int index) {
  // Never destroyed: its threads, and storages of other objects of the process, live until the end.
  static std::array<AsyncDevice*, kDevices> all = [] {
    std::array<AsyncDevice*, kDevices> made{};
    for (int i = 0; i < kDevices; ++i) made[static_cast<size_t>(i)] = new AsyncDevice(i);
    register_backend();
    return made;
  }();
  return *all.at(static_cast<size_t>(index));
}

AsyncDevice::AsyncDevice(int index) : index_(index) {
  for (size_t stream = 0; stream < kStreams; ++stream) {
    std::thread([this, stream] { serve(stream); }).detach();
  }
}

// ---------------------------------------------------------------- what a test scripts and sees

void AsyncDevice::reset(const DeviceOptions& options) {
  Lock lock(mutex_);
  held_ = pool_held_ = false;
  changed_.notify_all();
  changed_.wait(lock, [this] {
    for (size_t stream = 0; stream < kStreams; ++stream) {
      if (!empty(stream)) return false;
    }
    return true;
  });
  release_kept(lock);
  options_ = options;
  lost_.reset();
  reported_ = context_ = false;
  launched_ = copied_ = allocations_ = occupied_ = 0;
  refuse_from_ = UINT64_MAX;
  refuse_until_ = 0;
  faults_.clear();
  violations_.clear();
  refused_.clear();
  calls_ = 0;
  killed_at_ = UINT64_MAX;
  for (Line& line : lines_) line.end_ns = line.lost_ns = 0;
}

void AsyncDevice::fail_kernel(uint64_t nth, DeviceFault fault) {
  Lock lock(mutex_);
  faults_[launched_ + nth] = std::move(fault);
}

void AsyncDevice::refuse_allocation(uint64_t nth, uint64_t times) {
  Lock lock(mutex_);
  refuse_from_ = allocations_ + nth;
  refuse_until_ = refuse_from_ + times;
}

void AsyncDevice::kill(uint64_t nth) {
  Lock lock(mutex_);
  if (calls_ > killed_at_) return;  // a process that was killed does not live again
  killed_at_ = calls_ + nth;
}

bool AsyncDevice::killed() {
  Lock lock(mutex_);
  return calls_ > killed_at_;
}

std::optional<uint64_t> AsyncDevice::faulted() {
  Lock lock(mutex_);
  return lost_ ? lost_->record : std::nullopt;
}

std::vector<uint64_t> AsyncDevice::refused() {
  Lock lock(mutex_);
  return refused_;
}

void AsyncDevice::occupy(uint64_t bytes) {
  Lock lock(mutex_);
  occupied_ = bytes;
}

void AsyncDevice::hold(bool on) {
  Lock lock(mutex_);
  if (held_ && !on) lines_[0].end_ns = std::max(lines_[0].end_ns, monotonic_ns());
  held_ = on;
  changed_.notify_all();
}

void AsyncDevice::hold_pool(bool on) {
  Lock lock(mutex_);
  pool_held_ = on;
  changed_.notify_all();
}

bool AsyncDevice::lost() {
  Lock lock(mutex_);
  return lost_.has_value();
}

std::vector<std::string> AsyncDevice::violations() {
  Lock lock(mutex_);
  return violations_;
}

uint64_t AsyncDevice::used() {
  Lock lock(mutex_);
  return used_;
}

uint64_t AsyncDevice::kept() {
  Lock lock(mutex_);
  return kept_bytes_;
}

uint64_t AsyncDevice::launched() {
  Lock lock(mutex_);
  return launched_;
}

uint64_t AsyncDevice::copied() {
  Lock lock(mutex_);
  return copied_;
}

uint64_t AsyncDevice::queued() {
  Lock lock(mutex_);
  uint64_t queued = 0;
  for (const Line& line : lines_) queued += line.queue.size() + line.running;
  return queued;
}

uint64_t AsyncDevice::queued_ns() {
  Lock lock(mutex_);
  uint64_t ns = 0;
  for (const Line& line : lines_) {
    for (const Task& task : line.queue) ns += task.cost_ns;
    if (line.running) ns += line.running_ns;
  }
  return ns;
}

uint64_t AsyncDevice::now_ns() {
  Lock lock(mutex_);
  return lines_[0].end_ns;
}

bool AsyncDevice::has_context() {
  Lock lock(mutex_);
  return context_;
}

uint64_t AsyncDevice::lost_ns(size_t stream) {
  Lock lock(mutex_);
  return lines_[stream].lost_ns;
}

void AsyncDevice::note_violation(const std::string& what) {
  Lock lock(mutex_);
  violations_.push_back(what);
}

// ---------------------------------------------------------------- streams

void AsyncDevice::use() {
  Lock lock(mutex_);
  context_ = true;
}

void AsyncDevice::check() {
  Lock lock(mutex_);
  check(lock);
}

// Nothing uses the caller's memory any more when this throws.
void AsyncDevice::check(Lock& lock) {
  ++calls_;
  if (!over()) return;
  changed_.notify_all();
  changed_.wait(lock, [this] {
    return std::none_of(lines_.begin(), lines_.end(),
                        [](const Line& line) { return line.running; });
  });
  if (calls_ > killed_at_) throw Killed();
  DeviceFault fault = *lost_;
  if (reported_) fault.form = DeviceFault::Form::accelerator;
  reported_ = true;
  raise(fault);
}

void AsyncDevice::lose(DeviceFault fault) {
  if (!lost_) lost_ = std::move(fault);
  changed_.notify_all();
}

uint64_t AsyncDevice::copy_ns(uint64_t bytes) const {
  const uint64_t rate = options_.copy_bytes_per_s;
  return rate == 0
             ? 0
             : static_cast<uint64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(rate));
}

void AsyncDevice::launch(size_t stream, Task task) {
  Lock lock(mutex_);
  check(lock);
  changed_.wait(lock, [&] { return lines_[stream].queue.size() < options_.queue || lost_; });
  check(lock);
  task.record = record();
  copied_ += task.copy;
  if (task.kernel) {
    const uint64_t number = launched_++;
    const auto found = faults_.begin();
    if (found != faults_.end() && found->first <= number && befalls()) {
      task.fault = std::move(found->second);
      faults_.erase(found);
    }
  }
  push(lock, stream, std::move(task));
}

void AsyncDevice::push(Lock&, size_t stream, Task task) {
  context_ = true;
  Order& after = lines_[stream].after;
  const uint64_t number = ++after[stream];
  for (const DeviceBlockPtr& block : task.uses) {
    ++block->pending[stream];
    block->last[stream] = number;
  }
  if (task.marks) task.marks->after = after;
  for (size_t i = 0; i < kStreams && task.waits; ++i) {
    after[i] = std::max(after[i], task.waits->after[i]);
  }
  task.launched_ns = monotonic_ns();
  lines_[stream].queue.push_back(std::move(task));
  changed_.notify_all();
}

void AsyncDevice::serve(size_t stream) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::NoGradGuard no_grad;
  use_threads(1);
  Lock lock(mutex_);
  Line& line = lines_[stream];
  while (true) {
    changed_.wait(lock, [&] { return !line.queue.empty() && (!stopped(stream) || lost_); });
    Task task = std::move(line.queue.front());
    line.queue.pop_front();
    line.running = true;
    line.running_ns = task.cost_ns;
    changed_.notify_all();
    execute(lock, stream, std::move(task));
    line.running = false;
    changed_.notify_all();
  }
}

void AsyncDevice::execute(Lock& lock, size_t stream, Task task) {
  Line& line = lines_[stream];
  uint64_t started = std::max(line.end_ns, task.launched_ns);
  if (task.waits) {
    changed_.wait(lock, [&] { return task.waits->done || over(); });
    started = std::max(started, task.waits->at_ns);
  }
  if (line.end_ns != 0) line.lost_ns += started - line.end_ns;
  if (!task.kernel) line.lost_ns += task.cost_ns;
  line.end_ns = started + task.cost_ns;
  const uint64_t end = line.end_ns;
  const bool skipped = over();
  lock.unlock();
  std::optional<DeviceFault> fault = std::move(task.fault);
  if (!skipped) {
    if (!fault && task.work) {
      try {
        task.work();
      } catch (const std::exception& error) {
        fault.emplace();
        fault->text += std::string(" (") + error.what() + ")";
      }
    }
    if (end > monotonic_ns() + kSleepLeastNs) sleep_until(end);
  }
  task.work = nullptr;  // may free tensors
  lock.lock();
  if (fault && !skipped) {
    fault->record = task.record;
    lose(*std::move(fault));
  }
  if (task.marks) {
    task.marks->done = true;
    task.marks->at_ns = end;
  }
  for (const DeviceBlockPtr& block : task.uses) {
    if (--block->pending[stream] == 0) block->pending.erase(stream);
  }
  std::erase_if(deferred_, [this](const DeviceBlockPtr& block) {
    if (!settled(*block, block->stream)) return false;
    keep(block);
    return true;
  });
}

void AsyncDevice::synchronize(size_t stream) {
  Lock lock(mutex_);
  context_ = true;
  changed_.wait(lock, [&] { return empty(stream) || lost_; });
  check(lock);
}

void AsyncDevice::synchronize() {
  for (size_t stream = 0; stream < kStreams; ++stream) synchronize(stream);
}

void AsyncDevice::synchronize(const MarkPtr& mark) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return mark->done || lost_; });
  check(lock);
}

bool AsyncDevice::idle(size_t stream) {
  Lock lock(mutex_);
  check(lock);
  return empty(stream);
}

bool AsyncDevice::done(const MarkPtr& mark) {
  Lock lock(mutex_);
  check(lock);
  return mark->done;
}

MarkPtr AsyncDevice::record(size_t stream) {
  auto mark = std::make_shared<Mark>();
  Task task;
  task.marks = mark;
  launch(stream, std::move(task));
  return mark;
}

void AsyncDevice::wait(size_t stream, const MarkPtr& mark) {
  Task task;
  task.waits = mark;
  launch(stream, std::move(task));
}

size_t AsyncDevice::next_pooled() {
  Lock lock(mutex_);
  context_ = true;
  return 1 + pooled_++ % (kStreams - 1);
}

}  // namespace sing::test
