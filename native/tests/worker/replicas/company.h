// Several sessions in one process, which hold equal bytes once.
#pragma once

#include <memory>
#include <vector>

#include "tests/check.h"
#include "tests/harness.h"
#include "worker/loop/seat.h"
#include "worker/replicas/replicas.h"

namespace sing::test {

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

}  // namespace sing::test
