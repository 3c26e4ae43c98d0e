// Snapshots and replay: a session is a snapshot and the log after it.
#include <random>

#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

using Floats = std::vector<float>;

// A small program in which every step depends on the earlier ones, errors included.
class Program {
 public:
  explicit Program(Host& host) : host_(host) {
    add_ = host.define("aten::add_", "Tensor");
    mm_ = host.define("aten::mm");
    normal_ = host.define("aten::normal_");
    host.generator(0, GeneratorAction::seed, 11);
    state_ = host.upload(Floats(64, 1), {8, 8});
  }
  void step(int i) {
    const auto noise = host_.allocate({8, 8});
    host_.call(CallRecord(normal_, 4, 1).tensor(noise).real(0).real(0.1).none().returns_nothing());
    const Tensor product{host_.next_id(), {8, 8}};
    host_.call(CallRecord(mm_, 2, 1).tensor(noise).tensor(state_).returns(product));
    host_.call(CallRecord(add_, 3, 1).tensor(state_).tensor(product).integer(1).returns_nothing());
    if (i % 7 == 3) {  // fails, and is not reported before the next step is issued
      const Tensor wrong{host_.next_id(), {8, 8}};
      Tensor flat = state_;
      flat.sizes = {4, 16};
      host_.call(CallRecord(mm_, 2, 1).tensor(flat).tensor(flat).returns(wrong));
    }
    host_.free(noise.id);
    host_.free(product.id);
  }
  const Tensor& state() const { return state_; }

 private:
  Host& host_;
  uint32_t add_, mm_, normal_;
  Tensor state_;
};

// Returns the program's state at the end, with a stop and a new worker at each of `stops`.
Bytes run_with(const std::vector<int>& stops, bool from_snapshots) {
  Host host;
  host.start();
  Program program(host);
  for (int i = 0; i < 30; ++i) {
    program.step(i);
    if (std::find(stops.begin(), stops.end(), i) == stops.end()) continue;
    if (!from_snapshots) {
      host.stop();
      host.start();
      continue;
    }
    uint64_t position = 0;
    const File snapshot(host.snapshot(&position));
    host.stop();
    host.agent().retained.store(position);
    host.start(snapshot.fd());
  }
  host.synchronize();
  const auto answer = host.read(program.state());
  EXPECT(answer.ok());
  return answer.bytes;
}

}  // namespace

TEST(replay_from_the_start_gives_the_same_bytes) {
  const Bytes expected = run_with({}, false);
  EXPECT(run_with({2, 15, 29}, false) == expected);
}

TEST(snapshot_and_suffix_give_the_bytes_of_the_whole_log) {
  const Bytes expected = run_with({}, false);
  EXPECT(run_with({0, 3, 4, 10, 17, 29}, true) == expected);
}

TEST(a_snapshot_taken_while_running_is_one_of_its_position) {
  Host host;
  host.start();
  Program program(host);
  for (int i = 0; i < 20; ++i) program.step(i);
  uint64_t position = 0;
  const File snapshot(host.snapshot(&position));  // somewhere in the middle
  for (int i = 20; i < 40; ++i) program.step(i);
  host.synchronize();
  const auto expected = host.read(program.state()).bytes;
  host.stop();
  host.agent().retained.store(position);
  host.start(snapshot.fd());
  EXPECT(host.read(program.state()).bytes == expected);
}

TEST(a_parked_session_keeps_errors_losses_generators_and_events) {
  Host host;
  host.start();
  const auto mm = host.define("aten::mm");
  const auto a = host.upload({1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor lost{host.next_id(), {2, 2}};
  host.call(CallRecord(mm, 2, 1).tensor(a).tensor(a).returns(lost));
  const auto untouched = host.allocate({3});
  host.generator(4, GeneratorAction::seed, 1);
  uint64_t position = 0;
  while (host.worker().consumed.load() != host.head()) sched_yield();
  const File snapshot(host.snapshot(&position));
  EXPECT_EQ(position, host.head());
  host.stop();
  host.agent().retained.store(position);
  host.start(snapshot.fd());
  const auto pending = host.synchronize();
  EXPECT_EQ(pending.operation(), std::string("aten::mm"));
  EXPECT_EQ(host.read(lost).operation(), std::string("aten::mm"));
  EXPECT(host.values(untouched) == (Floats{0, 0, 0}));
  const Bytes state = host.generator_state(4);
  host.generator(5, GeneratorAction::seed, 1);
  EXPECT(host.generator_state(5) == state);
}

TEST(an_answered_request_is_not_answered_again) {
  Host host;
  host.start();
  const auto a = host.upload({1}, {1});
  EXPECT(host.values(a) == (Floats{1}));
  host.stop();
  const uint64_t position = host.worker().answer_position.load();
  const uint32_t bell = host.worker().bell.load();
  host.start();
  while (host.worker().consumed.load() != host.head()) sched_yield();
  EXPECT_EQ(host.worker().answer_position.load(), position);
  EXPECT_EQ(host.worker().bell.load(), bell);
}

TEST(a_half_taken_answer_is_completed_by_the_next_worker) {
  Host host(size_t{64} << 20);
  std::mt19937 random(3);
  Tensor tensor{host.next_id(), {5 << 20}};  // 20 MiB: five times around the ring
  std::vector<uint32_t> words(5 << 20);
  for (auto& word : words) word = static_cast<uint32_t>(random());
  host.allocate(tensor.id, tensor.bytes());
  const uint64_t piece = 8 << 20;
  for (uint64_t at = 0; at < tensor.bytes(); at += piece) {
    const uint64_t count = std::min(piece, tensor.bytes() - at);
    Writer out = read_payload(tensor.id, at, count);
    out.put_bytes(reinterpret_cast<std::byte*>(words.data()) + at, count);
    host.append(RecordKind::write, 0, out);
  }
  host.start();
  Bytes taken;
  const uint64_t position =
      host.begin_request(RecordKind::read, read_payload(tensor.id, 0, tensor.bytes()));
  int workers = 1;
  while (taken.size() < tensor.bytes()) {
    host.wait_answer(position);
    host.take(taken, 300'001);
    if (taken.size() > static_cast<size_t>(workers) * (3 << 20)) {
      if (workers % 2 == 0) {
        host.stop();
        host.start();
      } else {
        uint64_t at = 0;
        const File snapshot(host.snapshot(&at));
        EXPECT(at < position);  // the request is not complete
        host.stop();
        host.start(snapshot.fd());
      }
      ++workers;
    }
  }
  EXPECT(workers > 4);
  EXPECT(std::memcmp(taken.data(), words.data(), taken.size()) == 0);
}

TEST(an_answer_that_was_half_given_is_begun_again_as_a_whole) {
  Host host(size_t{64} << 20);
  host.start();
  const auto fill = host.define("aten::fill_", "Scalar");
  const Tensor tensor = host.allocate({2 << 20});  // 8 MiB: twice around the ring
  const auto filled_with = [&](int64_t value) {
    return std::move(CallRecord(fill, 2, 1).tensor(tensor).integer(value).returns_nothing());
  };
  const uint64_t filled = host.call(filled_with(1));
  Bytes taken;
  const uint64_t position =
      host.begin_request(RecordKind::read, read_payload(tensor.id, 0, tensor.bytes()));
  host.wait_answer(position);
  host.take(taken, 1 << 20);
  host.stop();
  host.replace(filled, filled_with(2));
  host.start();
  while (taken.size() < tensor.bytes()) host.take(taken, 700'001);
  std::vector<float> values(tensor.count());
  std::memcpy(values.data(), taken.data(), taken.size());
  EXPECT(values == Floats(tensor.count(), 2));
}

TEST(an_answer_that_was_given_stays_as_it_was_given) {
  Host host;
  host.start();
  const auto fill = host.define("aten::fill_", "Scalar");
  const Tensor tensor = host.allocate({16});
  const auto filled_with = [&](int64_t value) {
    return std::move(CallRecord(fill, 2, 1).tensor(tensor).integer(value).returns_nothing());
  };
  const uint64_t filled = host.call(filled_with(1));
  const uint64_t position =
      host.begin_request(RecordKind::read, read_payload(tensor.id, 0, tensor.bytes()));
  host.wait_answer(position);
  host.stop();
  host.replace(filled, filled_with(2));
  host.start();
  while (host.worker().consumed.load() != host.head()) sched_yield();
  Bytes taken;
  host.take(taken, tensor.bytes());
  std::vector<float> values(tensor.count());
  std::memcpy(values.data(), taken.data(), taken.size());
  EXPECT(values == Floats(tensor.count(), 1));
}

TEST(an_abandoned_answer_does_not_hold_the_worker) {
  Host host(size_t{64} << 20);
  host.start();
  const Tensor large{host.next_id(), {5 << 20}};
  host.allocate(large.id, large.bytes());
  for (int i = 0; i < 20; ++i) {
    const uint64_t position =
        host.begin_request(RecordKind::read, read_payload(large.id, 0, large.bytes()));
    if (i % 2 == 0) host.wait_answer(position);
    host.abandon();
    EXPECT(host.synchronize().ok());
  }
}

TEST(replay_is_not_held_to_a_smaller_grant) {
  Host host;
  host.start();
  const auto fill = host.define("aten::fill_", "Scalar");
  const auto large = host.allocate({4096});
  host.call(CallRecord(fill, 2, 1).tensor(large).integer(3).returns_nothing());
  host.wait_consumed();
  host.free(large.id);
  const auto small = host.upload({1}, {1});
  host.wait_consumed();
  host.stop();
  host.grant(4096);
  host.start();
  host.stop();  // perhaps in the middle of the replay
  host.start();
  EXPECT(host.values(small) == (Floats{1}));
}

TEST(torn_snapshots_are_refused) {
  Host host;
  host.start();
  Program program(host);
  for (int i = 0; i < 5; ++i) program.step(i);
  const File snapshot(host.snapshot());
  host.stop();
  const size_t bytes = file_bytes(snapshot.fd());
  const Mapping content = map_file(snapshot.fd(), bytes, true);
  const auto load = [&](size_t count) {
    const File copy(memfd_create("copy", 0));
    EXPECT(write(copy.fd(), content.data(), count) == static_cast<ssize_t>(count));
    State state(c10::Device(c10::DeviceType::CPU), nullptr);
    AgentPage agent{};
    WorkerPage page{};
    Orders orders(page);
    Snapshots snapshots(state, host.arena(), agent, orders, 2);
    snapshots.open(copy.fd(), -1);
    snapshots.finish_loading();
  };
  load(bytes);
  for (const size_t count : {size_t{0}, size_t{8}, size_t{63}, bytes / 2, bytes - 1}) {
    EXPECT_THROWS(std::runtime_error, load(count));
  }
  // Any byte of header and tables may be wrong: it is refused or read as something else, but never
  // crashes.
  SnapshotHeader header;
  std::memcpy(&header, content.data(), sizeof(header));
  std::mt19937 random(5);
  int refused = 0;
  for (int i = 0; i < 600; ++i) {
    // Not in the middle, which is the state of a generator: there, any bytes are valid.
    const uint64_t at = random() % 200;
    std::byte& byte = content.data()[i % 2 ? at : bytes - 1 - at];
    const std::byte before = byte;
    byte = static_cast<std::byte>(random());
    try {
      load(bytes);
    } catch (const std::exception&) {
      ++refused;
    }
    byte = before;
  }
  EXPECT(refused > 100);
}

TEST(extents_that_cannot_be_are_refused) {
  Host host;
  host.start();
  host.upload(Floats(5000, 1), {5000});
  host.upload(Floats(5000, 2), {5000});
  host.wait_consumed();
  const File snapshot(host.snapshot());
  host.stop();
  const Mapping content = map_file(snapshot.fd(), file_bytes(snapshot.fd()), true);
  const Bytes good(content.data(), content.data() + content.size());
  const auto load = [&](const std::function<void(ExtentEntry&, ExtentEntry&)>& change) {
    std::memcpy(content.data(), good.data(), good.size());
    ExtentEntry entries[2];
    std::memcpy(entries, content.data() + sizeof(SnapshotHeader), sizeof(entries));
    change(entries[0], entries[1]);
    std::memcpy(content.data() + sizeof(SnapshotHeader), entries, sizeof(entries));
    host.start(snapshot.fd());
    host.stop();
  };
  using Entry = ExtentEntry;
  load([](Entry&, Entry&) {});
  load([](Entry& a, Entry& b) { std::swap(a.offset, b.offset); });
  const std::vector<std::function<void(Entry&, Entry&)>> wrong = {
      [](Entry& a, Entry& b) { a.offset = b.offset; },
      [](Entry& a, Entry& b) { a.offset = b.offset + kPageBytes; },
      [](Entry& a, Entry&) { a.offset += 8; },
      [](Entry& a, Entry&) { a.offset = uint64_t{1} << 40; },
      [](Entry& a, Entry&) { a.offset = UINT64_MAX - kPageBytes + 1; },
      [](Entry& a, Entry&) { a.count += 4; },
      [](Entry& a, Entry&) { a.count = UINT64_MAX; },
      [](Entry& a, Entry&) { a.count = 100; },
      [](Entry& a, Entry&) { a.version = 0; },
      [](Entry& a, Entry&) { a.carried = 1; },
      [](Entry& a, Entry&) { a.id += 77; },
      [](Entry& a, Entry& b) { std::swap(a.id, b.id); },
  };
  for (const auto& change : wrong) EXPECT_THROWS(std::runtime_error, (load(change), 0));
}

TEST(a_worker_refuses_a_log_whose_start_is_gone) {
  Host host;
  host.agent().retained.store(64);
  EXPECT_THROWS(std::runtime_error, host.start());
}

TEST(what_did_not_change_outlives_a_log_that_was_given_back_without_a_snapshot) {
  Host host;
  host.start();
  const std::vector<float> kept(4096, 1.5F), changing(2048, 2.5F);
  const Tensor first = host.upload(kept, {4096});
  host.synchronize();
  uint64_t position = 0;
  const File older(host.snapshot(&position));
  host.commit(position);
  // As when the log is full and snapshots are not allowed: `retained` moves, without a snapshot.
  const Tensor second = host.upload(changing, {2048});
  host.synchronize();
  host.commit(host.head());
  const File newer(host.snapshot(&position));
  host.commit(position);
  host.stop();
  host.start(newer.fd());
  EXPECT(host.values(first) == kept);
  EXPECT(host.values(second) == changing);
}
