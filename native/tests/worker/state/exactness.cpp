// Since when values that the notebook has read may differ from those of a recovery.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <set>

#include "ops/inexact.h"
#include "tests/check.h"
#include "tests/device/async_device.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

using Floats = std::vector<float>;

// A session on a device that is not exact, with calls of an exact and an inexact operator.
class Program {
 public:
  explicit Program(c10::Device device = AsyncDevice::device()) {
    AsyncDevice::at().reset({});
    host.options.device = device;
    host.start();
    add_ = host.define("aten::add_", "Scalar");
    cumsum_ = host.define("aten::cumsum");
    x_ = host.upload({1, 2, 3}, {3});
  }
  void exact() {
    host.call(CallRecord(add_, 3, 1).tensor(x_).real(1).integer(1).returns_nothing());
  }
  void inexact() {
    const Tensor sums{host.next_id(), {3}};
    host.call(CallRecord(cumsum_, 3, 1).tensor(x_).integer(0).none().returns(sums));
  }
  void read() { EXPECT_EQ(host.values(x_).size(), size_t{3}); }
  uint64_t inexact_since() { return host.worker().inexact_ns.load(); }
  uint64_t recovered() { return host.worker().recovered_ns.load(); }
  // Another worker, from the beginning of the log, that has executed all of it.
  void recover(int snapshot_fd = -1) {
    host.stop();
    host.start(snapshot_fd);
    while (host.worker().consumed.load() != host.head()) sched_yield();
  }
  Host host;

 private:
  uint32_t add_, cumsum_;
  Tensor x_;
};

}  // namespace

TEST(a_recovery_is_approximate_since_the_first_answer_after_an_inexact_operator) {
  Program program;
  program.exact();
  program.read();
  EXPECT_EQ(program.inexact_since(), 0U);
  program.inexact();
  program.exact();
  program.host.wait_consumed();  // an answer, too
  const uint64_t since = program.inexact_since();
  EXPECT(since != 0);
  program.read();
  EXPECT_EQ(program.inexact_since(), since);
  program.recover();
  EXPECT_EQ(program.recovered(), since);
  EXPECT_EQ(program.inexact_since(), 0U);  // nothing was read since
  program.read();
  EXPECT(program.inexact_since() > since);
}

TEST(what_nobody_has_read_is_not_approximate) {
  Program program;
  program.read();
  program.inexact();
  while (program.host.worker().consumed.load() != program.host.head()) sched_yield();
  program.recover();
  EXPECT_EQ(program.recovered(), 0U);
}

TEST(a_snapshot_that_is_kept_makes_a_recovery_exact) {
  Program program;
  program.inexact();
  program.read();
  uint64_t position = 0;
  const File snapshot(program.host.snapshot(&position));
  EXPECT_EQ(program.inexact_since(), 0U);
  EXPECT(program.host.worker().older_inexact_ns.load() != 0);
  program.read();
  program.host.commit(position);
  program.recover(snapshot.fd());
  EXPECT_EQ(program.recovered(), 0U);
  program.inexact();
  program.read();
  const uint64_t since = program.inexact_since();
  program.recover(snapshot.fd());
  EXPECT_EQ(program.recovered(), since);
}

TEST(a_snapshot_that_is_not_kept_changes_nothing) {
  Program program;
  program.inexact();
  program.read();
  const uint64_t since = program.inexact_since();
  const File lost(program.host.snapshot());
  program.read();
  const File lost_too(program.host.snapshot());
  program.recover();
  EXPECT_EQ(program.recovered(), since);
}

TEST(on_another_model_of_device_every_answer_counts) {
  Program program;
  program.exact();
  program.read();
  const uint64_t since = program.host.worker().answered_ns.load();
  EXPECT(since != 0);
  program.recover();
  EXPECT_EQ(program.recovered(), 0U);
  program.read();
  program.host.agent().processors.store(7);
  program.recover();
  EXPECT(program.recovered() > since);
}

TEST(a_software_device_is_exact) {
  Program program(c10::Device(c10::DeviceType::CPU));
  program.inexact();
  program.read();
  EXPECT_EQ(program.inexact_since(), 0U);
  program.recover();
  EXPECT_EQ(program.recovered(), 0U);
}

TEST(with_deterministic_algorithms_a_listed_operator_is_exact) {
  Program program;
  program.read();
  program.host.agent().deterministic.store(1);
  program.inexact();  // turns them on, which itself makes what came before inexact
  program.read();
  EXPECT(program.inexact_since() != 0);
  uint64_t position = 0;
  const File snapshot(program.host.snapshot(&position));
  program.host.commit(position);
  program.inexact();
  program.read();
  EXPECT_EQ(program.inexact_since(), 0U);
  program.recover(snapshot.fd());
  EXPECT_EQ(program.recovered(), 0U);
  program.host.agent().deterministic.store(0);
  program.inexact();
  program.read();
  EXPECT(program.inexact_since() != 0);
}

TEST(operators_without_a_deterministic_algorithm_run_all_the_same) {
  Host host;
  host.agent().deterministic.store(1);
  host.start();
  const auto put = host.define("aten::put_");
  const auto x = host.upload({1, 2, 3}, {3});
  const auto index = host.upload_indices({2, 0}, {2});
  const auto values = host.upload({9, 8}, {2});
  const auto call = [&] {
    host.call(CallRecord(put, 4, 1)
                  .tensor(x)
                  .tensor(index)
                  .tensor(values)
                  .boolean(false)
                  .returns_nothing());
  };
  for (int i = 0; i < 2; ++i) {
    call();
    EXPECT(host.values(x) == (Floats{8, 2, 9}));
    EXPECT(at::globalContext().deterministicAlgorithms());
  }
  // The program itself wants errors.
  Settings settings{};
  read_settings(settings);
  Writer out;
  put_settings(out, settings);
  host.append(RecordKind::settings, 0, out);
  call();
  const Answer answer = host.synchronize();
  EXPECT_EQ(answer.operation(), std::string("aten::put_"));
  // Neither the program nor the session.
  settings[1] = 0;
  out.clear();
  put_settings(out, settings);
  host.append(RecordKind::settings, 0, out);
  host.agent().deterministic.store(0);
  call();
  EXPECT(host.synchronize().ok());
  EXPECT(!at::globalContext().deterministicAlgorithms());
}

TEST(every_listed_operator_exists) {
  std::set<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    std::string plain = name.name.substr(6);
    if (plain.ends_with('_')) plain.pop_back();
    names.insert(plain);
  }
  for (const std::string_view listed : kInexact) {
    if (!names.contains(std::string(listed))) throw std::runtime_error(std::string(listed));
  }
  EXPECT(is_listed_inexact("aten::index_add_"));
  EXPECT(!is_listed_inexact("aten::add_"));
  EXPECT(!is_listed_inexact("other::index_add"));
}
