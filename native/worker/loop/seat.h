// The sessions that one process executes, one at a time: those of a job's ranks on one device.
//
// Note [Turns]. Each rank has all compute threads of the device while it executes, and gives them
// to the next one when it waits for its peers: once in a training step, when its activations are
// gone. One thread, the executor, executes the records of all sessions, so that there is one team
// of compute threads, and a switch is a few microseconds of that thread. Each session has a thread
// of its own besides, which sleeps until its client has written records or orders come, and parks
// when they require that; it does nothing while its session has its turn. When a turn has ended,
// the next one begins before the thread of the first session is woken: it could take the executor's
// core.
//
// A turn ends when the program waits for its peers. A program that is late with its next record is
// waited for a moment, and longer while the session holds memory that it does not share: the next
// one would take as much besides. That a thread of the program waits for peers, as DDP's does while
// the backward pass continues, does not end a turn in the middle. A program that has its answer and
// holds nothing gives up its turn at once: the others come to the same place, and free what they
// have from the step before. A session that parks for a moment, as its snapshot begins, is waited
// for, too, if it holds memory. The present turn waits while another session frees memory that a
// snapshot still saves.
//
// A program that waits for an answer to its next record but a few does not wait for the step of
// another rank: it has a turn in between. All ranks come to the place at which they free what they
// have of the step before, although one of them is ahead.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>

#include "worker/exec/helpers.h"
#include "worker/loop/orders.h"
#include "worker/replicas/content.h"

namespace sing {

class Seat {
 public:
  // `threads`: see Helpers.
  explicit Seat(int threads) : helpers_(threads) {}
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

  // The executor: carries out turns, one at a time, until end().
  void serve();
  void end();
  // Turns that began while another session's turn had just ended, and the time between: from the
  // end of the last record of one to the begin of the first record of the other.
  struct Switches {
    uint64_t count;
    uint64_t ns;
  };
  Switches switches() const { return {switches_.load(), switch_ns_.load()}; }
  Helpers& helpers() { return helpers_; }

  // What a session does in its turn.
  class Member {
   public:
    // Returns true if it was interrupted: it is to be continued when it is ready.
    virtual bool carry_out() = 0;
    virtual bool ready() = 0;
    // True if its program waits for the answer to one of the next records. To be called while its
    // turn has not begun.
    virtual bool asks() = 0;
    // True if its turn, which has just ended, is to continue before others have theirs: it is to
    // park for a moment only.
    virtual bool returns() = 0;
    // It may give up a version that the present turn changes: see Note [Ahead] in ahead.h. To be
    // called while its turn has not begun, or is interrupted.
    virtual void give_up(const ContentId& version) = 0;

   protected:
    ~Member() = default;
  };

  // --- the thread of a session ---
  // Has the executor carry out a turn, and waits until it has ended; rethrows its exception. If
  // orders come before it begins, it is not carried out.
  void take_turn(Orders& orders, Member& member);
  // While it exists, the session frees memory between its turns, which takes a while if a snapshot
  // still saves that. The present turn waits.
  class GivingBack {
   public:
    explicit GivingBack(Seat& seat);
    GivingBack(const GivingBack&) = delete;
    GivingBack& operator=(const GivingBack&) = delete;
    ~GivingBack();

   private:
    Seat& seat_;
  };

  // --- in a turn ---
  // To be called when everything is ready for its first record: the thread of the session before
  // continues then.
  void note_begun() noexcept;
  // Sessions that wait for their turns.
  size_t waiting() const noexcept { return waiting_count_.load(std::memory_order_seq_cst); }
  bool wanted() const noexcept { return waiting() != 0; }
  // True if the present turn is to be interrupted for the answer to another program; as it was when
  // look() was called, or when that one began to wait.
  bool asked() const noexcept { return asking_.load(std::memory_order_relaxed) != 0; }
  void look();
  // Returns when no session gives back memory, or orders have come.
  void await_given_back(const Orders& orders) {
    if (giving_back_.load(std::memory_order_relaxed) != 0) [[unlikely]]
      await_all_given_back(orders);
  }
  // Sessions that wait for their turns may give up a version.
  void ask_owners(const ContentId& version);

  // --- any thread ---
  // Orders have come for a session that may wait for its turn.
  void notify();

 private:
  // Lives as long as its session's thread waits for `done`.
  struct Turn {
    Turn(Orders& orders, Member& member) : orders(orders), member(member), asks(member.asks()) {}
    Orders& orders;
    Member& member;
    bool asks;
    std::condition_variable changed;  // wakes its session's thread
    bool begun = false;
    bool done = false;
    int wakers = 0;  // threads that use `orders`
    std::exception_ptr failure;
  };
  void await_all_given_back(const Orders& orders);
  void let_go(Turn*& turn) noexcept;
  Turn* next(std::unique_lock<std::mutex>& lock);
  Turn* returned(std::unique_lock<std::mutex>& lock);
  void count_waiting() noexcept;

  Helpers helpers_;
  mutable std::mutex mutex_;         // everything below
  std::condition_variable changed_;  // wakes the executor
  std::deque<Turn*> waiting_;
  std::deque<Turn*> interrupted_;
  Turn* present_ = nullptr;
  Turn* over_ = nullptr;                  // the last turn, while its session's thread still waits
  std::atomic<size_t> waiting_count_{0};  // of both
  std::atomic<size_t> asking_{0};         // of those that wait
  std::atomic<size_t> giving_back_{0};    // see GivingBack
  const Orders* last_ = nullptr;
  bool returns_ = false;  // the last one
  uint64_t left_ns_ = 0;  // when the last turn ended, if another one waited; 0: none did
  std::atomic<uint64_t> switches_{0};
  std::atomic<uint64_t> switch_ns_{0};
  bool ended_ = false;
};

}  // namespace sing
