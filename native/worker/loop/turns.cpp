// What a session does in a seat, see Note [Turns] in seat.h, and the end of a lease.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include "worker/loop/clock.h"
#include "worker/loop/session.h"
#include "worker/loop/spin.h"
#include "worker/replicas/ahead.h"

namespace sing {

namespace {

// In a seat, a session whose client is this late with the next record gives up its turn if another
// session waits for one.
constexpr uint64_t kLingerNs = 1'000'000;
// The same while it has this much more memory that it does not share than when its turn began: the
// next session would take as much besides.
constexpr uint64_t kHoldingNs = 20'000'000;
constexpr uint64_t kHoldingBytes = 1 << 20;
// The same while a thread of its program waits for other ranks: the program may do so, too. Unless
// it has so much more that its step takes many times as long anyway.
constexpr uint64_t kHoldingInBackgroundNs = 5'000'000;
constexpr uint64_t kHoldingMuchBytes = 32 << 20;

constexpr uint32_t kProgramAwaits = 2;  // see ClientPage::awaiting_peers

// A program that waits for the answer to one of so many records has a turn in that of another
// session, which is interrupted so often.
constexpr int kAsksMax = 4;
constexpr uint32_t kYieldedMax = 64;

// So many records of another session are looked at, which takes about a millisecond.
constexpr uint64_t kAheadMax = 10'000;

// Interval at which take_lease() checks for progress. A program that issues no record for one
// interval is idle: it is not expected to reach the place soon.
constexpr std::chrono::milliseconds kDry{20};

}  // namespace

// What this thread does between two turns, and what the executor does in one,
// exclude each other.
void Session::take_turns() {
  struct Joined {
    Joined(Replicas* replicas, uint32_t session, std::function<bool()> rests)
        : replicas(replicas), session(session) {
      if (replicas) replicas->rendezvous().join(session, std::move(rests));
    }
    ~Joined() {
      if (replicas) replicas->rendezvous().leave(session);
    }
    Replicas* replicas;
    uint32_t session;
  } joined(state_.storages.replicas(), state_.storages.session(), [this] { return rests(); });
  state_.storages.ask_owners([this](const ContentId& version) { seat_->ask_owners(version); });
  while (!orders_.pending() || obey()) {
    if (state_.storages.holds_freed()) let_go();
    if (give_back() || consumed_ >= awaited_.load(std::memory_order_acquire)) {
      seat_->take_turn(orders_, *this);
    } else {
      sleep();
    }
  }
}

// Executes the next records as long as they only allocate and free: others have their turns until
// its own one comes, and can use the memory. Returns true if there are records that need a turn.
bool Session::give_back() {
  const uint64_t head = checked_head();
  std::optional<Seat::GivingBack> giving_back;
  while (consumed_ < std::min(head, awaited_.load(std::memory_order_acquire))) {
    RecordHeader header;
    std::memcpy(&header, log_.data() + consumed_ % capacity_, sizeof(header));
    if (header.kind != static_cast<uint8_t>(RecordKind::storages)) break;
    if (!giving_back) giving_back.emplace(*seat_);
    const uint64_t before = consumed_;
    execute_records(consumed_ + 1, head);
    if (consumed_ == before) break;  // there are orders
  }
  return consumed_ != head;
}

// True if its program waits for the answer to one of the next records.
bool Session::asks() {
  if (state_.storages.resident() > began_resident_ + kHoldingBytes) return false;
  // Another session's turn does not end if this log is corrupt.
  const uint64_t head = client_->head.load(std::memory_order_acquire);
  RecordHeader header{};
  uint64_t at = consumed_;
  for (int count = 0; at < head && head - at <= capacity_ && count < kAsksMax; ++count) {
    std::memcpy(&header, log_.data() + at % capacity_, sizeof(header));
    if (!valid(header, head - at)) return false;
    at += header.bytes;
  }
  return at == head && (header.flags & kRequest) != 0;
}

// True if the turn is to be interrupted for the answer to another program. Before, waits until
// others have given back what they have freed: the next records would take as much besides.
bool Session::yields() {
  if (!in_turn_) return false;
  seat_->await_given_back(orders_);
  if (consumed_ < answers_until_ || yielded_ >= kYieldedMax || !seat_->wanted() ||
      executor_.given()) {
    return false;
  }
  if (const uint64_t now = coarse_ns(); now != looked_ns_) {
    looked_ns_ = now;
    seat_->look();
  }
  return seat_->asked();
}

// True if it is not expected to execute anything soon.
bool Session::rests() const {
  return orders_.pending() || (client_->awaiting_peers.load() != 0 &&
                               client_->head.load(std::memory_order_acquire) ==
                                   worker_->consumed.load(std::memory_order_relaxed));
}

// See Note [Ahead] in ahead.h.
void Session::give_up(const ContentId& version) {
  const auto owner = state_.storages.owner_of(version);
  if (owner.bytes == 0) return;
  Ahead ahead(state_.operators, owner.id, owner.bytes);
  auto found = Ahead::Found::nothing;
  const uint64_t head = client_->head.load(std::memory_order_acquire);
  uint64_t at = consumed_;
  for (uint64_t count = 0; at < head && head - at <= capacity_ && count < kAheadMax; ++count) {
    const std::byte* record = log_.data() + at % capacity_;
    RecordHeader header;
    std::memcpy(&header, record, sizeof(header));
    if (!valid(header, head - at)) return;
    const std::span payload(record + sizeof(header), header.bytes - sizeof(header));
    // A call that waits for others, which know what it changes.
    if (at == consumed_ && executor_.waits() && ahead.changes(header, payload)) return;
    found = ahead.look(header, payload);
    if (found != Ahead::Found::nothing) break;
    at += header.bytes;
  }
  if (found != Ahead::Found::overwritten) return;
  state_.storages.give_up(owner.id);
  let_go();
}

bool Session::carry_out() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::NoGradGuard no_grad;
  struct Entered {
    explicit Entered(Session& session) : session(session) {
      session.executor_.enter();
      session.in_turn_ = true;
    }
    ~Entered() {
      session.in_turn_ = false;
      session.executor_.leave();
    }
    Session& session;
  } entered(*this);
  if (!std::exchange(continues_, false)) {
    dry_since_ns_ = 0;
    began_with_ = state_.storages.unshared();
    began_resident_ = state_.storages.resident();
    yielded_ = 0;
    answers_until_ = asks() ? client_->head.load(std::memory_order_relaxed) : 0;
  }
  seat_->note_begun();
  while (!orders_.pending() || executor_.given()) {
    if (yields()) {
      ++yielded_;
      return continues_ = true;
    }
    if (execute_some()) {
      dry_since_ns_ = 0;
      if (executor_.waits() && !orders_.pending()) return continues_ = true;
      if (rests_after_answer()) break;
    } else {
      helpers_.waited();
      if (!linger()) break;
    }
  }
  executor_.end_waiting();
  state_.storages.settle(Storages::Leave::uploads);  // only the executor may call kernels
  return false;
}

// True if it has memory that others could not use, or that they would take as well.
bool Session::holds() const {
  return state_.storages.unsettled() || state_.storages.unshared() > began_with_ + kHoldingBytes;
}

// See Note [Turns] in seat.h.
bool Session::returns() { return continues_ = orders_.pauses() && holds(); }

// The same.
bool Session::rests_after_answer() const {
  return answered_ == consumed_ && seat_->wanted() && !holds();
}

// How long to wait for further records while others want the device.
uint64_t Session::patience() const {
  const uint32_t awaits = client_->awaiting_peers.load();
  if (awaits == kProgramAwaits) return 0;
  const bool much = state_.storages.unshared() > began_with_ + kHoldingMuchBytes;
  if (holds()) return awaits != 0 && !much ? kHoldingInBackgroundNs : kHoldingNs;
  return awaits != 0 ? 0 : kLingerNs;
}

// At the end of the log: waits for further records. Returns false if the turn is to end.
bool Session::linger() {
  if (!seat_->wanted()) {
    idle();
    return !rests_after_answer();
  }
  if (rests_after_answer()) return false;
  const uint64_t now = monotonic_ns();
  if (dry_since_ns_ == 0) dry_since_ns_ = now;
  const uint64_t lingered = now - dry_since_ns_;
  const uint64_t most = patience();
  if (lingered >= most) return false;
  Spin spin(kSpinsWithThreads);
  while (client_->head.load(std::memory_order_acquire) == consumed_) {
    if (spin.once()) continue;
    orders_.sleep(client_->head, consumed_, std::chrono::nanoseconds(most - lingered));
    break;
  }
  return true;
}

void Session::take_lease(uint64_t token, uint64_t within_ns) {
  leaving_.store(token, std::memory_order_relaxed);
  if (within_ns > 0 && steps_.aim()) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(within_ns);
    uint64_t dry_at = UINT64_MAX;
    while (!orders_.await_over(token, std::min(end, std::chrono::steady_clock::now() + kDry))) {
      const uint64_t consumed = worker_->consumed.load(std::memory_order_relaxed);
      const bool dry = client_->head.load(std::memory_order_relaxed) == consumed;
      if ((dry && consumed == dry_at) || std::chrono::steady_clock::now() >= end) break;
      dry_at = dry ? consumed : UINT64_MAX;
    }
    steps_.aim_at_nothing();
  }
  orders_.lease(token, false);
}

}  // namespace sing
