// Several sessions in one process, which hold equal bytes once.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/harness.h"
#include "worker/loop/seat.h"
#include "worker/replicas/rendezvous.h"
#include "worker/replicas/replicas.h"

namespace sing::test {

// The record of an operator's number.
inline Writer defined(uint32_t number, const char* name, const char* overload) {
  Writer out;
  out.put<uint32_t>(number);
  out.put_string(name);
  out.put_string(overload);
  return out;
}

// One session of a seat, and operators that its tests use.
struct Rank {
  explicit Rank(Replicas* replicas, bool checks = true, uint64_t mapped_bytes = 1 << 20,
                Seat* seat = nullptr)
      : host(size_t{64} << 20) {
    host.options.seat = seat;
    host.options.replicas = replicas;
    host.options.limits.check_splicing = checks;
    host.options.limits.check_writes = checks;
    host.options.limits.piece_bytes = 4096;
    host.options.limits.mapped_bytes = mapped_bytes;
    host.start();
    add_each = host.define("aten::_foreach_add_", "List");
    mul_each = host.define("aten::_foreach_mul_", "Scalar");
    mul = host.define("aten::mul", "Tensor");
    normal = host.define("aten::normal_");
  }

  // to += alpha * from
  void add(const std::vector<Tensor>& to, const std::vector<Tensor>& from, double alpha) {
    host.call(CallRecord(add_each, 3, 0).tensors(to).tensors(from).real(alpha));
  }
  void scale(const std::vector<Tensor>& tensors, double by) {
    host.call(CallRecord(mul_each, 2, 0).tensors(tensors).real(by));
  }
  Tensor multiply(const Tensor& a, const Tensor& b) {
    const Tensor result{host.next_id(), a.sizes};
    host.call(CallRecord(mul, 2, 1).tensor(a).tensor(b).returns(result));
    return result;
  }
  Tensor constant(float value, int64_t count = kCount) {
    return host.upload(std::vector<float>(static_cast<size_t>(count), value), {count});
  }
  // The value of a tensor whose elements are all the same.
  float value(const Tensor& tensor) {
    const auto values = host.values(tensor);
    for (const float each : values) EXPECT_EQ(each, values[0]);
    return values[0];
  }

  static constexpr int64_t kCount = 5000;
  Host host;
  uint32_t add_each, mul_each, mul, normal;
};

// Keeps the executor of a seat in a turn, from the time that it begins until it is released.
class Occupied : private Seat::Member {
 public:
  explicit Occupied(Seat& seat) : seat_(seat) {}
  ~Occupied() { release(); }
  void await_begun() const {
    while (!begun_) sched_yield();
  }
  void release() {
    released_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  bool carry_out() override {
    seat_.note_begun();
    begun_ = true;
    while (!released_) sched_yield();
    return false;
  }
  bool ready() override { return true; }
  bool asks() override { return false; }
  bool returns() override { return false; }
  void give_up(const ContentId&) override {}

  Seat& seat_;
  std::atomic<bool> begun_{false}, released_{false};
  WorkerPage page_{};
  Orders orders_{page_};
  std::thread thread_{[this] { seat_.take_turn(orders_, *this); }};
};

struct Company {
  // `checks`: that what is derived to be equal is.
  explicit Company(size_t ranks, bool checks = true, uint64_t mapped_bytes = 1 << 20,
                   Replicas::Hash hash = &Replicas::hash_bytes, Seat* seat = nullptr)
      : replicas(hash) {
    for (size_t i = 0; i < ranks; ++i) {
      this->ranks.push_back(std::make_unique<Rank>(&replicas, checks, mapped_bytes, seat));
    }
  }
  Rank& operator[](size_t rank) { return *ranks[rank]; }
  // Lets each rank do the same, one after the other.
  template <class Work>
  void each(const Work& work) {
    for (auto& rank : ranks) {
      work(*rank);
      rank->host.wait_consumed();
    }
  }
  Replicas::Figures figures() const { return replicas.figures(); }

  Replicas replicas;
  std::vector<std::unique_ptr<Rank>> ranks;
};

// Ranks that have turns.
class Job {
 public:
  // `checks`: that what is derived to be equal is; then no memory is changed for all.
  explicit Job(size_t count, bool checks = false)
      : company_(std::in_place, count, checks, 1 << 20, &Replicas::hash_bytes, &seat_),
        replicas(company_->replicas),
        ranks(company_->ranks) {}
  ~Job() {
    company_.reset();
    seat_.end();
    executor_.join();
  }
  Rank& operator[](size_t rank) { return *ranks[rank]; }
  // The same tensor for each rank.
  std::vector<Tensor> constant(float value, int64_t count = kCount) {
    std::vector<Tensor> made;
    for (auto& rank : ranks) made.push_back(rank->constant(value, count));
    for (auto& rank : ranks) rank->host.wait_consumed();
    return made;
  }
  Rendezvous::Figures meetings() { return replicas.rendezvous().figures(); }
  Seat& seat() { return seat_; }

  static constexpr int64_t kCount = 500'000;

 private:
  Seat seat_{1};
  std::optional<Company> company_;
  std::thread executor_{[this] { seat_.serve(); }};

 public:
  Replicas& replicas;
  std::vector<std::unique_ptr<Rank>>& ranks;
};

}  // namespace sing::test
