#include "worker/loop/session.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <bit>
#include <utility>

#include "oplog/futex.h"
#include "worker/exec/alone.h"
#include "worker/loop/clock.h"
#include "worker/loop/spin.h"
#include "worker/state/blocks.h"

namespace sing {

namespace {

// Bytes of a long log that are executed between two reads of the clock.
constexpr uint64_t kStretchBytes = 64 << 10;

// Time for which freed host memory is kept for the next tensors of an idle program, and after which
// a fault is looked for that was not read.
constexpr std::chrono::seconds kUnsettled{2};

// Note [Naps]: adaptive batching. If a program makes no requests and issues its operators more
// slowly than they are executed, a worker that waits for each of them brings no gain, and costs CPU
// time: client and worker may be hardware threads of one core, and the host of a virtual machine
// spins for a while after its guest has gone to sleep. So the worker of a software device naps, and
// then executes many records at once. A request wakes it at once; the records that came during the
// nap are then still to be executed, but a nap is only a small part of the time since the last
// request. A nap during which nothing was written is followed by a futex sleep.
constexpr uint64_t kNapPart = 16;
constexpr uint64_t kNapLeastNs = 300'000;
constexpr uint64_t kNapMostNs = 1'000'000;
// Note [Questions]: a program that often requests values, such as one that checks its arguments on
// the device, computes for about ten microseconds between two requests, with a few operators among
// them. Waking the worker takes longer than executing these operators, and the program waits for
// both. So for a while after each request the worker stays awake, unless other threads need its
// core: the OS scheduler runs a thread that spins after those, and a thread that slept before them.
constexpr uint64_t kQuestionsNs = 200'000;
constexpr uint64_t kPreemptedNs = 150'000;    // without a read of the clock: other threads ran on
                                              // the core
constexpr uint64_t kCrowdedNs = 200'000'000;  // time for which they are expected to need it again

// Without this, timers are late by 50 us.
constexpr unsigned long kTimerSlackNs = 1'000;

// A device other than the CPU works on for a while when the program is idle: the intervals at which
// the worker looks double from here.
constexpr std::chrono::nanoseconds kWorking{5'000'000};
// A worker that ends waits this long for what it has started, to count the time of it.
constexpr uint64_t kLastNs = 2 * DeviceTime::kAheadNs;

}  // namespace

Session::Session(const SessionFiles& files, const SessionOptions& options)
    : log_(map_ring(files.log, file_bytes(files.log), false)),
      capacity_(log_.size() / 2),
      client_(map_page<ClientPage>(files.client, false)),
      worker_(map_page<WorkerPage>(files.worker, true, kAnswerRingBytes)),
      agent_(map_page<AgentPage>(files.agent, false)),
      threads_(options.threads),
      spins_(options.device.is_cpu() && options.threads != 1 ? kSpinsWithThreads : kSpins),
      seat_(options.seat),
      own_helpers_(options.threads),
      helpers_(seat_ ? seat_->helpers() : own_helpers_),
      orders_(*worker_, seat_ ? [seat = seat_] { seat->notify(); } : std::function<void()>()),
      state_(options.device, &agent_->memory_granted, options.limits, options.replicas),
      snapshots_(state_, files.arena, *agent_, orders_, options.epoch),
      answers_(*client_, worker_, orders_, {log_.data(), log_.size()}, &state_.exactness),
      memory_failures_(*worker_, *agent_),
      executor_(state_, answers_, memory_failures_, options.skip, options.careful_until,
                options.room),
      epoch_(options.epoch),
      prepare_(options.prepare) {
  const c10::DeviceGuard device(
      options.device);  // with several devices: the one that memory is taken from
  // The main thread sees a failed load at its next check for orders.
  snapshots_.loads().on_failure([this] { orders_.end(); });
  if (prepare_) {
    orders_.gate(false);
    consumed_ = files.contents < 0 ? snapshots_.open(files.snapshot, files.readiness)
                                   : snapshots_.open_moved(files.snapshot, files.contents,
                                                           files.carried, files.base);
    snapshots_.finish_loading();
    return;
  }
  snapshots_.loads().publish_left(&worker_->loading_bytes);
  if (files.snapshot >= 0) consumed_ = snapshots_.open(files.snapshot, files.readiness);
  claim();
}

Session::~Session() {
  if (!claimed_) return;
  worker_->gate_open.store(0);
  worker_->memory_resident.store(0);
}

// Devices of one model compute the same bytes, as far as they are exact.
static uint64_t model_of(const AgentPage& agent) noexcept {
  const uint64_t kind = agent.device_kind + 1;
  const uint64_t cores = agent.threads.load() + agent.processors.load();
  return kind << 56 | static_cast<uint64_t>(agent.capability.load()) << 32 | cores;
}

// From here on this process is the session's worker.
void Session::claim() {
  if (!whole_) throw std::runtime_error("the newer snapshot was not taken over");
  if (consumed_ < agent_->retained.load(std::memory_order_acquire)) {
    throw std::runtime_error("the log no longer holds the records after position " +
                             std::to_string(consumed_));
  }
  WorkerPage& page = *worker_;
  if (snapshots_.moved()) {
    state_.exactness.continue_from(page);
  } else {
    recovery_ = state_.exactness.begin(consumed_, model_of(*agent_), page);
  }
  if (recovery_.inexact_ns != 0) page.recovered_ns.store(recovery_.inexact_ns);
  page.furthest.store(std::max({page.furthest.load(), page.consumed.load(), consumed_}));
  page.pid = static_cast<uint32_t>(getpid());
  page.epoch.store(epoch_);
  page.asleep.store(0);
  page.memory_resident.store(state_.storages.resident());
  page.dirty_bytes.store(state_.storages.dirty());
  page.loading_bytes.store(snapshots_.loads().bytes_left());
  page.consumed.store(consumed_);
  page.completed.store(state_.time ? consumed_ : 0);
  memory_failures_.open();
  busy_ns_ = page.busy_ns.load();
  diverged_before_ = page.diverged.load();
  claimed_ = true;
}

void Session::gate(bool open) {
  if (open && !claimed_) claim();
  orders_.gate(open);
}

void Session::replay(uint64_t until) {
  reached_ = {};
  std::future<void> reached = reached_.get_future();
  awaited_.store(until, std::memory_order_release);
  orders_.replaying(true);
  gate(true);
  reached.wait();
}

template <class Work>
auto Session::with_device(Work work) {
  try {
    return work();
  } catch (...) {
    throw_if_lost(state_.device, worker_->consumed.load(std::memory_order_relaxed), {});
    throw;
  }
}

void Session::await_parked() {
  const bool parked = orders_.await_parked();
  // A driver's wait ends in this thread's current device, and would make a context there.
  const c10::DeviceGuard device(state_.device);
  with_device([&] {
    wait_for_device(state_.device);
    if (parked && state_.time) orders_.while_parked([this] { tell_device_time(); });
  });
}

Taken Session::snapshot(Manner manner, const std::function<void()>& frozen) {
  return with_device([&] { return snapshots_.take(manner, consumed_, *worker_, frozen); });
}

void Session::adopt(int snapshot_fd) {
  if (claimed_) throw std::runtime_error("this worker executes the session already");
  const c10::DeviceGuard device(state_.device);
  whole_ = false;
  with_device([&] {
    consumed_ = snapshots_.adopt(snapshot_fd);
    snapshots_.finish_loading();
  });
  whole_ = true;
}

void Session::end() {
  snapshots_.abort();
  orders_.end();
}

// The client may write any value as its head: everything below it must be in the ring.
uint64_t Session::checked_head() const {
  const uint64_t head = client_->head.load(std::memory_order_acquire);
  const uint64_t retained = agent_->retained.load(std::memory_order_relaxed);
  if (head < consumed_ || head - std::min(head, retained) > capacity_ ||
      head - consumed_ > capacity_) {
    throw CorruptLog("the log's head lies where no client puts it");
  }
  return head;
}

void settle_thread(int threads) {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  if (threads > 0) use_threads(threads);  // a property of this thread
}

void Session::run() {
  if (prepare_ && !orders_.await_open()) return;
  settle_thread(seat_ ? 0 : threads_);
  const c10::DeviceGuard device(state_.device);
  struct Running {
    explicit Running(Orders& orders) : orders(orders) { orders.begin_run(); }
    ~Running() { orders.finish_run(); }
    Orders& orders;
  } running(orders_);
  with_device([this] {
    try {
      if (seat_) {
        take_turns();
      } else {
        execute_log();
      }
    } catch (const LoadFailed&) {
      if (!orders_.ended()) throw;
    }
    snapshots_.loads().rethrow();
    if (state_.time) count_the_last();
  });
}

void Session::execute_log() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::NoGradGuard no_grad;
  executor_.enter();
  executor_.set_deterministic(agent_->deterministic.load() != 0);
  while (!orders_.pending() || obey()) {
    if (!execute_some()) {
      helpers_.waited();
      idle();
    }
  }
}

// Returns false if there is nothing to execute.
bool Session::execute_some() {
  if (state_.storages.holds_freed()) let_go();
  const uint64_t awaited = awaited_.load(std::memory_order_acquire);
  if (consumed_ >= awaited) {
    awaited_.store(UINT64_MAX, std::memory_order_relaxed);
    orders_.replaying(false);
    reached_.set_value();
    return true;
  }
  const uint64_t head = checked_head();
  if (head == consumed_) return false;
  drain(std::min({head, consumed_ + kStretchBytes, awaited}), head);
  return true;
}

void Session::let_go() {
  state_.storages.sweep();
  worker_->memory_resident.store(state_.storages.resident(), std::memory_order_relaxed);
}

// Executes the records that begin below `end`, or up to the next order.
void Session::drain(uint64_t end, uint64_t head) {
  const uint64_t began = monotonic_ns();
  const bool deterministic = agent_->deterministic.load(std::memory_order_relaxed) != 0;
  // What others have executed for it is found only as they have executed it.
  if (deterministic != executor_.deterministic() && !executor_.given()) [[unlikely]] {
    executor_.set_deterministic(deterministic);
    // What was executed before would now be executed in another way.
    if (!state_.device.is_cpu()) state_.exactness.note_inexact();
  }
  const uint64_t answered = answered_;
  execute_records(end, head);
  unsettled_ = !state_.device.is_cpu() || Blocks::get().kept() > 0;
  const uint64_t now = monotonic_ns();
  if (state_.time) {
    if (client_->head.load(std::memory_order_relaxed) == consumed_) state_.time->finish(consumed_);
    tell_device_time();
  } else {
    busy_ns_ += now - began;
    worker_->busy_ns.store(busy_ns_, std::memory_order_relaxed);
  }
  if (answered_ != answered) requested_ns_ = now;
  worker_->active_ns.store(now, std::memory_order_relaxed);
  helpers_.worked(now, now - began);
}

void Session::execute_records(uint64_t end, uint64_t head) {
  while (consumed_ < end && (!orders_.pending() || executor_.given()) && !yields()) {
    const uint64_t furthest = worker_->furthest.load(std::memory_order_relaxed);
    state_.storages.enforce(consumed_ >= furthest);
    const std::byte* at = log_.data() + consumed_ % capacity_;
    RecordHeader header;
    std::memcpy(&header, at, sizeof(header));
    if (!valid(header, head - consumed_)) throw CorruptLog("a record with an impossible header");
    const std::span<const std::byte> payload(at + sizeof(header), header.bytes - sizeof(header));
    if (steps_.reached() && belongs_to_step(header) && !executor_.given()) {
      steps_.aim_at_nothing();
      orders_.lease(leaving_.load(std::memory_order_relaxed), false);
      break;
    }
    const bool request = (header.flags & kRequest) != 0;
    const bool timed = state_.time && belongs_to_step(header);
    if (timed && !await_turn(request)) break;
    state_.storages.allow_overdraft(request);
    if (!executor_.execute(consumed_, header, payload)) break;
    note_step(consumed_ < furthest);
    consumed_ += header.bytes;
    if (request) note_answer();
    if (timed) state_.time->end_record(consumed_);
    worker_->memory_resident.store(state_.storages.resident(), std::memory_order_relaxed);
    worker_->dirty_bytes.store(state_.storages.dirty(), std::memory_order_relaxed);
    worker_->consumed.store(consumed_, std::memory_order_release);
    tell_progress();
  }
}

// Before a record that may give the device something to do: waits while it has enough, see Note
// [Device time]. Returns false if orders came.
bool Session::await_turn(bool request) {
  DeviceTime& time = *state_.time;
  while (!request && time.full(consumed_)) {
    if (orders_.pending()) return false;
    DeviceTime::nap();
    tell_device_time();
    worker_->active_ns.store(monotonic_ns(), std::memory_order_relaxed);
  }
  time.begin_record(consumed_);
  return true;
}

void Session::tell_device_time() {
  DeviceTime& time = *state_.time;
  time.poll();
  busy_ns_ += time.take_busy_ns();
  worker_->busy_ns.store(busy_ns_, std::memory_order_relaxed);
  worker_->completed.store(time.rests() ? consumed_ : time.completed(), std::memory_order_relaxed);
}

// A device that is lost by now is left to the next worker.
void Session::count_the_last() noexcept {
  try {
    state_.time->finish(consumed_);
    state_.time->settle(kLastNs);
    tell_device_time();
  } catch (const std::exception&) {
  }
}

// Rings once when the position for which the client waits is reached. If the worker sees the
// client's position too late for this record, it sees it after the next one: the client chooses a
// position well below its head.
void Session::tell_progress() noexcept {
  const uint64_t wanted = client_->progress_wanted.load(std::memory_order_relaxed);
  if (wanted == progress_told_ || wanted > consumed_) [[likely]]
    return;
  progress_told_ = wanted;
  worker_->bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(&worker_->bell);
}

// See Note [Exactness].
void Session::note_answer() noexcept {
  answered_ = consumed_;
  WorkerPage& page = *worker_;
  if (state_.diverged == page.diverged.load(std::memory_order_relaxed) - diverged_before_) return;
  page.diverged.store(diverged_before_ + state_.diverged);
  if (recovery_.inexact_ns != 0) return;
  recovery_.inexact_ns = recovery_.answered_ns != 0 ? recovery_.answered_ns : monotonic_ns();
  page.recovered_ns.store(recovery_.inexact_ns);
}

// Replayed records say nothing about the program's speed.
void Session::note_step(bool replayed) noexcept {
  if (replayed) return;
  const uint64_t kind = executor_.kind(), memory = state_.storages.resident();
  if (kind == 0) {
    steps_.amend(memory);
  } else {
    steps_.note(kind, coarse_ns(), memory);
  }
}

void Session::idle() {
  if (napped_at_ == consumed_) {
    sleep();
    return;
  }
  if (state_.device.is_cpu()) {
    const uint64_t nap = std::min((monotonic_ns() - requested_ns_) / kNapPart, kNapMostNs);
    if (nap >= kNapLeastNs) {
      napped_at_ = consumed_;
      orders_.sleep(client_->head, consumed_, std::chrono::nanoseconds(nap), Rest::napping);
      return;
    }
  }
  // See Note [Questions]. Helpers that sleep need no core.
  const bool alone = spins_ == kSpins || helpers_.asleep();
  uint64_t looked = monotonic_ns();
  const bool stays = alone && looked - preempted_ns_ > kCrowdedNs;
  Spin spin(alone ? kSpins : spins_);
  while (client_->head.load(std::memory_order_acquire) == consumed_) {
    if (orders_.pending()) return;
    if (spin.once()) continue;
    const uint64_t now = monotonic_ns();
    if (now - looked > kPreemptedNs) preempted_ns_ = now;
    if (!stays || preempted_ns_ == now || now > requested_ns_ + kQuestionsNs) return sleep();
    looked = now;
  }
}

// True if the device has executed everything. Throws if it is lost.
bool Session::device_rests() const {
  if (state_.device.is_cpu()) return true;
  const c10::impl::VirtualGuardImpl guard(state_.device.type());
  return guard.queryStream(guard.getStream(state_.device));
}

// Note [Caches]. The allocator of a GPU keeps freed memory for the next tensors. It is given back
// when the agent orders that, because another session needs it; otherwise it is kept, so that the
// next cell need not allocate it again. Host memory that a software device keeps is in no account,
// so it is given back when no tensors come for a while, or when other sessions have the device. In
// a seat it is that of all ranks, and a job that is resized has no lease for a moment: so only when
// the lease does not come back for a while.
//
// After that while, a fault of a GPU that was not read is noticed, too: its worker is replaced
// while the program is idle.
void Session::sleep() {
  if (!unsettled_) {
    orders_.sleep(client_->head, consumed_);
    return;
  }
  std::chrono::nanoseconds nap = kWorking;
  while (state_.time && !state_.time->rests()) {
    orders_.sleep(client_->head, consumed_, nap);
    if (client_->head.load(std::memory_order_acquire) != consumed_ || orders_.pending()) return;
    tell_device_time();
    worker_->active_ns.store(monotonic_ns(), std::memory_order_relaxed);
    nap = std::min<std::chrono::nanoseconds>(2 * nap, kUnsettled);
  }
  orders_.sleep(client_->head, consumed_, kUnsettled);
  if (client_->head.load(std::memory_order_acquire) != consumed_ || orders_.pending()) return;
  if (device_rests()) settle();
}

void Session::settle() {
  if (!unsettled_) return;
  unsettled_ = false;
  if (state_.device.is_cpu()) Blocks::get().empty();
}

uint64_t Session::give_back_cache() {
  if (state_.device.is_cpu()) {
    Blocks::get().empty();
    return 0;
  }
  uint64_t kept = 0;
  with_device([this, &kept] {
    const c10::DeviceGuard device(state_.device);
    auto* const allocator = c10::getDeviceAllocator(state_.device.type());
    allocator->emptyCache();
    using c10::CachingAllocator::StatType;
    const auto figures = allocator->getDeviceStats(state_.device.index());
    const auto all = static_cast<size_t>(StatType::AGGREGATE);
    const int64_t reserved = figures.reserved_bytes[all].current;
    kept = static_cast<uint64_t>(
        std::max<int64_t>(reserved - figures.allocated_bytes[all].current, 0));
  });
  return kept;
}

// See Note [Caches].
bool Session::obey() {
  state_.storages.settle(Storages::Leave::saveable);  // for a snapshot while it is parked
  if (!state_.time) {
    if (seat_) {
      return orders_.obey({}, kUnsettled, [this] {
        if (orders_.leaves()) settle();
      });
    }
    if (orders_.leaves()) settle();
    return orders_.obey();
  }
  state_.time->pause(consumed_);
  return orders_.obey([this](bool only_work) {
    const bool waiting = client_->head.load(std::memory_order_acquire) != consumed_;
    state_.time->resume(consumed_, only_work, waiting);
  });
}

}  // namespace sing
