// Streams and events of the double: each stream has a thread that runs behind its process.
//
// What is enqueued begins a moment later (CUDA_DOUBLE_LAG_US), so that a missing synchronisation
// shows. A fault happens when an operation is executed; from then on the context of that card is
// lost.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace sing_double {

// What is executed returns a code of CUDA's: not 0 is a fault.
using Work = std::function<int()>;

// A moment in a stream.
struct Moment {
  std::mutex mutex;
  std::condition_variable passed;
  bool done = false;
  uint64_t ns = 0;

  void pass();
  void wait();
};

class Stream {
 public:
  Stream(int card, unsigned flags, int priority);

  // In a lost context, computations are left out; all else is executed, so that no thread waits
  // forever.
  void compute(Work work);
  void enqueue(Work work);
  std::shared_ptr<Moment> record();
  void wait_for(std::shared_ptr<Moment> moment);
  void synchronize();
  bool idle();
  // No more work is to come: the stream ends after what it has.
  void end();

  const int card;
  const unsigned flags;
  const int priority;

 private:
  struct Item {
    Work work;
    uint64_t not_before;
  };

  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool busy_ = false, ended_ = false;
};

// This process's context on a card.
struct Context {
  std::atomic<int> fault{0};
  std::mutex mutex;
  std::deque<Stream*> streams;  // the first one is the default stream
};

// The context of this process on a card; nullptr if none was made.
Context* context_of(int card);
// Makes it if necessary. Returns a code of CUDA's.
int make_context(int card);
// Waits for all streams of a card.
void synchronize_card(int card);
// Ends a stream that a program destroys.
void destroy(Stream* stream);
// Loses the context of a card.
void lose(int card, int code, const std::string& why);

// True in a child forked from a process that had used the driver: CUDA does not work there.
extern std::atomic<bool> bad_fork;

uint64_t now_ns();

}  // namespace sing_double
