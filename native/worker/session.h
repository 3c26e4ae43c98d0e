// One session in a worker: its mappings, its state, and the loop that executes its log.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oplog/mapping.h"
#include "worker/answers.h"
#include "worker/executor.h"
#include "worker/orders.h"
#include "worker/state.h"

namespace sing {

struct SessionFiles {
  int log = -1;
  int client = -1;
  int worker = -1;
  int agent = -1;
  int snapshot = -1;  // or none
};

struct SessionOptions {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  int threads = 0;  // of a software device; 0: as they are
  uint64_t epoch = 1;
  std::vector<uint64_t> skip;
  Limits limits;
};

class Session {
 public:
  Session(const SessionFiles& files, const SessionOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Executes the log until the order to end. Throws CorruptLog. The thread that calls it is the
  // main thread of orders.h.
  void run();
  Orders& orders() { return orders_; }
  // From any thread; closes the gate meanwhile.
  int snapshot(uint64_t& position, uint64_t& bytes);
  uint64_t position() const { return consumed_; }
  const State& state() const { return state_; }

 private:
  void drain(uint64_t head);
  void idle();
  uint64_t checked_head() const;

  Mapping log_;
  uint64_t capacity_;
  Page<ClientPage> client_;
  Page<WorkerPage> worker_;
  Page<AgentPage> agent_;
  int threads_;
  int spins_;
  Orders orders_;
  State state_;
  Answers answers_;
  Executor executor_;
  uint64_t consumed_ = 0;
  uint64_t busy_ns_ = 0;
};

}  // namespace sing
