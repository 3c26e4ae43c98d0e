// Acts as client and agent of a session, with the worker in a thread of this process.
#pragma once

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "oplog/compound.h"
#include "oplog/geometry.h"
#include "oplog/mapping.h"
#include "worker/loop/session.h"
#include "worker/snapshot/snapshot.h"

namespace sing::test {

using Bytes = std::vector<std::byte>;

// One tensor as a client knows it.
struct Tensor {
  uint32_t id = 0;
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::ScalarType::Float;

  uint64_t count() const;
  uint64_t bytes() const { return count() * c10::elementSize(dtype); }
};

struct Answer {
  AnswerStatus status = AnswerStatus::ok;
  Bytes bytes;

  bool ok() const { return status == AnswerStatus::ok; }
  ErrorKind kind() const;  // of an error
  std::string operation() const;
  std::string message() const;
  // Of the record that failed.
  uint64_t position() const {
    Reader in(bytes);
    in.get_bytes(1);
    return in.get<uint64_t>();
  }
};

// The position of the record that this thread executes as a worker; none in other threads.
inline thread_local const Word<uint64_t>* t_executed = nullptr;
inline std::optional<uint64_t> executed_record() {
  return t_executed ? std::optional(t_executed->load()) : std::nullopt;
}

// Builds the payload of a call.
class CallRecord {
 public:
  CallRecord(uint32_t op, uint16_t arguments, uint16_t returns);
  CallRecord& tensor(const Tensor& tensor, uint8_t flags = 0);
  CallRecord& tensor(uint32_t id, const Geometry& geometry);
  CallRecord& tensors(const std::vector<Tensor>& tensors);
  CallRecord& integer(int64_t value);
  CallRecord& real(double value);
  CallRecord& boolean(bool value);
  CallRecord& integers(const std::vector<int64_t>& values);
  CallRecord& string(const std::string& value);
  CallRecord& none();
  CallRecord& number(double value);  // a number as a CPU tensor
  CallRecord& generator(uint32_t number);
  CallRecord& sparse(const Compound& compound, const std::vector<Tensor>& parts);
  // Outputs.
  CallRecord& returns_nothing();
  CallRecord& returns(const Tensor& tensor);
  CallRecord& returns(const Tensor& tensor, const Geometry& geometry, uint64_t bytes);
  CallRecord& returns_number(uint32_t id);                              // in a request
  CallRecord& returns_numbers(const std::array<uint32_t, 3>& numbers);  // of what may be sparse
  const Writer& payload() const { return out_; }
  Writer& writer() { return out_; }

 private:
  Writer out_;
};

class Host {
 public:
  explicit Host(size_t capacity = 1 << 22);
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  // The agent's side.
  SessionOptions options;
  void start(int snapshot_fd = -1, int readiness_fd = -1);
  // Ends the worker as an order does, between two records.
  void stop();
  // Like stop(), while a thread takes a snapshot.
  void stop_taking(std::thread& taking);
  // Makes another worker of the session, prepared from a snapshot; take_over() makes it the current
  // one.
  void prepare(int snapshot_fd, int contents_fd = -1, int carried_fd = -1, int base_fd = -1);
  Session& prepared() { return *prepared_; }
  void take_over();
  bool running() const { return thread_.joinable(); }
  // True if the run has ended, or has not begun.
  bool over() const { return over_; }
  // Called by a client that waits for a worker whose run is over; it starts another one. Without
  // it, waiting is an error.
  std::function<void()> on_over;
  // What ended the last run, after stop().
  const std::string& ended_by() const { return corruption_; }
  const std::optional<DeviceLost>& loss() const { return lost_; }
  // Called with each answer, and the position of the end of its request.
  std::function<void(uint64_t, const Answer&)> on_answer;
  // Waits for the end of the run. Returns the text of the error that ended it, if one did.
  std::string corruption();
  // Waits for the end of the run, which a lost device ends.
  DeviceLost lost();
  Session& session() { return *session_; }
  int snapshot(uint64_t* position = nullptr, bool stop = true);
  void commit(uint64_t position) { agent_->retained.store(position); }
  SessionFiles files(int snapshot, int readiness = -1, int contents = -1, int carried = -1,
                     int base = -1) const;
  int arena() const { return arena_file_.fd(); }
  void grant(uint64_t bytes) { agent_->memory_granted.store(bytes); }

  // The client's side.
  uint32_t define(const std::string& name, const std::string& overload = "");
  Tensor allocate(std::vector<int64_t> sizes, at::ScalarType dtype = at::ScalarType::Float);
  void allocate(uint32_t id, uint64_t bytes);
  void free(uint32_t id);
  uint32_t next_id() { return id_++; }
  Tensor upload(const std::vector<float>& values, std::vector<int64_t> sizes);
  Tensor upload_indices(const std::vector<int64_t>& values, std::vector<int64_t> sizes);
  void write(const Tensor& tensor, const void* data);
  uint64_t call(const CallRecord& call) { return append(RecordKind::call, 0, call.payload()); }
  Answer request_call(const CallRecord& call);
  // For a request whose answer depends on data: the log keeps the answer, as a client has it.
  Answer request_recorded(const CallRecord& call);
  void record_answer(uint64_t position, const Answer& answer);
  uint64_t append(RecordKind kind, uint8_t flags, const Writer& payload);
  uint64_t append_raw(const void* bytes, size_t count);
  Answer request(RecordKind kind, const Writer& payload, uint8_t flags = 0);
  Answer read(const Tensor& tensor);
  std::vector<float> values(const Tensor& tensor);
  Answer synchronize() { return request(RecordKind::synchronize, Writer()); }
  void generator(uint32_t number, GeneratorAction action, uint64_t seed);
  Bytes generator_state(uint32_t number);
  void wait_consumed();

  // Takes an answer in steps, for tests that leave it half taken.
  uint64_t begin_request(RecordKind kind, const Writer& payload, uint8_t flags = 0);
  void wait_answer(uint64_t position);
  uint64_t take(Bytes& into, uint64_t most);
  void abandon();
  // Replaces the call that ends at `end` by another one of the same size: executed again, the log
  // gives other values, as after a kernel that adds in any order.
  void replace(uint64_t end, const CallRecord& call);

  ClientPage& client() { return *client_; }
  WorkerPage& worker() { return *worker_; }
  Page<WorkerPage>& worker_page() { return worker_; }
  Bytes log_bytes(uint64_t from, uint64_t to) const {
    return Bytes(log_.data() + from % capacity_, log_.data() + from % capacity_ + (to - from));
  }
  AgentPage& agent() { return *agent_; }
  uint64_t head() const { return head_; }

 private:
  template <class Ready>
  void wait(Ready ready);
  void publish(bool requested);
  void run();

  File log_file_, client_file_, worker_file_, agent_file_, arena_file_;
  Mapping log_;
  uint64_t capacity_;
  Page<ClientPage> client_;
  Page<WorkerPage> worker_;
  Page<AgentPage> agent_;
  std::unique_ptr<Session> session_, prepared_;
  std::thread thread_;
  std::atomic<bool> over_{false};
  std::string corruption_;
  std::optional<DeviceLost> lost_;
  uint64_t head_ = 0;
  uint32_t id_ = 1;
  uint32_t ops_ = 1;
};

Writer read_payload(uint32_t id, uint64_t offset, uint64_t count);
Geometry contiguous(const Tensor& tensor);

}  // namespace sing::test
