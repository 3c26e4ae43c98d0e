#include "worker/session.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <time.h>
#include <unistd.h>

#include <bit>

#include "worker/snapshot.h"
#include "worker/spin.h"

namespace sing {

namespace {

uint64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

Session::Session(const SessionFiles& files, const SessionOptions& options)
    : log_(map_ring(files.log, file_bytes(files.log), false)),
      capacity_(log_.size() / 2),
      client_(map_page<ClientPage>(files.client, false)),
      worker_(map_page<WorkerPage>(files.worker, true, kAnswerRingBytes)),
      agent_(map_page<AgentPage>(files.agent, false)),
      threads_(options.threads),
      spins_(options.threads == 1 ? kSpins : kSpinsWithThreads),
      orders_(*worker_),
      state_(options.device, &agent_->memory_granted, options.limits),
      answers_(*client_, worker_, orders_),
      executor_(state_, answers_, options.skip) {
  if (files.snapshot >= 0) {
    state_.storages.enforce(false);  // what is in the snapshot was granted when it was made
    consumed_ = load_snapshot(files.snapshot, state_);
    state_.storages.enforce(true);
  }
  if (consumed_ < agent_->retained.load(std::memory_order_acquire)) {
    throw std::runtime_error("the log no longer holds the records after position " +
                             std::to_string(consumed_));
  }
  WorkerPage& page = *worker_;
  page.furthest.store(std::max({page.furthest.load(), page.consumed.load(), consumed_}));
  page.pid = static_cast<uint32_t>(getpid());
  page.epoch.store(options.epoch);
  page.asleep.store(0);
  page.memory_resident.store(state_.storages.resident());
  page.consumed.store(consumed_);
  busy_ns_ = page.busy_ns.load();
}

Session::~Session() {
  worker_->gate_open.store(0);
  worker_->memory_resident.store(0);
}

// The client writes its head as it likes: what lies below it must be in the ring.
uint64_t Session::checked_head() const {
  const uint64_t head = client_->head.load(std::memory_order_acquire);
  const uint64_t retained = agent_->retained.load(std::memory_order_relaxed);
  if (head < consumed_ || head - std::min(head, retained) > capacity_ ||
      head - consumed_ > capacity_) {
    throw CorruptLog("the log's head lies where no client puts it");
  }
  return head;
}

void Session::run() {
  if (threads_ > 0) at::set_num_threads(threads_);  // a property of this thread
  const c10::DeviceGuard device(state_.device);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::NoGradGuard no_grad;
  struct Running {
    explicit Running(Orders& orders) : orders(orders) { orders.begin_run(); }
    ~Running() { orders.finish_run(); }
    Orders& orders;
  } running(orders_);
  while (!orders_.pending() || orders_.obey()) {
    const uint64_t head = checked_head();
    if (head == consumed_) {
      idle();
    } else {
      drain(head);
    }
  }
}

// Executes what lies below `head`, or up to the next order.
void Session::drain(uint64_t head) {
  const uint64_t began = monotonic_ns();
  while (consumed_ != head && !orders_.pending()) {
    const uint64_t furthest = worker_->furthest.load(std::memory_order_relaxed);
    state_.storages.enforce(consumed_ >= furthest);
    const std::byte* at = log_.data() + consumed_ % capacity_;
    RecordHeader header;
    std::memcpy(&header, at, sizeof(header));
    if (!valid(header, head - consumed_)) throw CorruptLog("a record with an impossible header");
    const std::span<const std::byte> payload(at + sizeof(header), header.bytes - sizeof(header));
    if (!executor_.execute(consumed_, header, payload)) break;
    consumed_ += header.bytes;
    worker_->memory_resident.store(state_.storages.resident(), std::memory_order_relaxed);
    worker_->consumed.store(consumed_, std::memory_order_release);
  }
  const uint64_t now = monotonic_ns();
  busy_ns_ += now - began;
  worker_->busy_ns.store(busy_ns_, std::memory_order_relaxed);
  worker_->active_ns.store(now, std::memory_order_relaxed);
}

void Session::idle() {
  for (Spin spin(spins_); client_->head.load(std::memory_order_acquire) == consumed_;) {
    if (orders_.pending()) return;
    if (!spin.once()) {
      orders_.sleep(client_->head, consumed_);
      return;
    }
  }
}

int Session::snapshot(uint64_t& position, uint64_t& bytes) {
  int fd = -1;
  orders_.while_parked([&] {
    position = consumed_;
    fd = write_snapshot(state_, position, bytes);
  });
  return fd;
}

}  // namespace sing
