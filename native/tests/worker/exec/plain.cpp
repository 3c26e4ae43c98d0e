// Codec, ring, futexes and orders: the parts that do not need torch.
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

#include "oplog/codec.h"
#include "oplog/futex.h"
#include "oplog/mapping.h"
#include "tests/check.h"
#include "worker/loop/orders.h"

using namespace sing;

namespace {

int shared_file(size_t bytes) {
  const int fd = memfd_create("test", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw_errno("memfd");
  return fd;
}

}  // namespace

TEST(what_was_written_is_read) {
  Writer out;
  out.put<uint8_t>(7);
  out.put<int64_t>(-3);
  out.put_string("aten::add");
  out.put<double>(0.5);
  out.patch<uint8_t>(0, 9);
  Reader in(out.view());
  EXPECT_EQ(int{in.get<uint8_t>()}, 9);
  EXPECT_EQ(in.get<int64_t>(), -3);
  EXPECT_EQ(in.get_string(), std::string_view("aten::add"));
  EXPECT_EQ(in.get<double>(), 0.5);
  EXPECT(in.ok());
  EXPECT_EQ(in.remaining(), size_t{0});
}

TEST(a_reader_never_leaves_its_span) {
  Writer out;
  out.put<uint32_t>(1000);  // claims more than there is
  out.put<uint32_t>(5);
  Reader text(out.view());
  EXPECT(text.get_string().empty());
  EXPECT(!text.ok());
  EXPECT_EQ(text.get<uint32_t>(), 0u);  // after an error, only zeros
  Reader counted(out.view());
  EXPECT_EQ(counted.get_count(8), 0u);
  EXPECT(!counted.ok());
  Reader huge(out.view());
  EXPECT(huge.get_bytes(SIZE_MAX).empty());
  EXPECT(!huge.ok());
}

TEST(impossible_headers_are_refused) {
  const RecordHeader good{16, 3, 1, 0};
  EXPECT(valid(good, 16));
  EXPECT(!valid(good, 8));
  EXPECT(!valid({12, 3, 0, 0}, 64));
  EXPECT(!valid({0, 3, 0, 0}, 64));
  EXPECT(!valid({16, 0, 0, 0}, 64));
  EXPECT(!valid({16, 12, 0, 0}, 64));
  EXPECT(!valid({16, 3, 0, 1}, 64));
  EXPECT(!valid({kRecordBytesMax + 8, 3, 0, 0}, UINT64_MAX));
}

TEST(a_ring_continues_where_it_ends) {
  const int fd = shared_file(kPageBytes * 2);
  const Mapping writer = map_ring(fd, kPageBytes * 2, true);
  const Mapping reader = map_ring(fd, kPageBytes * 2, false);
  const uint64_t at = kPageBytes * 2 - 4;
  std::memcpy(writer.data() + at, "12345678", 8);
  EXPECT_EQ(std::memcmp(reader.data() + at, "12345678", 8), 0);
  EXPECT_EQ(std::memcmp(reader.data(), "5678", 4), 0);
  close(fd);
}

TEST(a_ring_of_a_wrong_size_is_refused) {
  const int fd = shared_file(kPageBytes * 3);
  EXPECT_THROWS(std::runtime_error, map_ring(fd, kPageBytes * 3, false));
  EXPECT_THROWS(std::runtime_error, map_ring(fd, kPageBytes * 2, false));
  close(fd);
}

TEST(a_page_of_another_layout_is_refused) {
  const int fd = shared_file(kPageBytes);
  EXPECT_THROWS(std::runtime_error, map_page<AgentPage>(fd, true));
  Page<AgentPage> page(map_file(fd, kPageBytes, true));
  page->magic = kMagic;
  page->version = kLayoutVersion + 1;
  EXPECT_THROWS(std::runtime_error, map_page<AgentPage>(fd, true));
  page->version = kLayoutVersion;
  map_page<AgentPage>(fd, true);
  EXPECT_THROWS(std::runtime_error, map_page<WorkerPage>(fd, true, kAnswerRingBytes));
  close(fd);
}

TEST(a_futex_on_a_readable_page_is_woken_through_the_writable_one) {
  const int fd = shared_file(kPageBytes);
  const Mapping readable = map_file(fd, kPageBytes, false);
  const Mapping writable = map_file(fd, kPageBytes, true);
  auto* word = reinterpret_cast<Word<uint64_t>*>(writable.data());
  const auto* view = reinterpret_cast<const Word<uint64_t>*>(readable.data());
  EXPECT_EQ(futex_wait(low_half(*view), 1), Woken::changed);
  EXPECT_EQ(futex_wait(low_half(*view), 0, std::chrono::milliseconds(1)), Woken::timed_out);
  std::thread waker([&] {
    word->store(1);
    futex_wake(low_half(*word));
  });
  while (view->load() == 0) futex_wait(low_half(*view), 0);
  waker.join();
  EXPECT_EQ(view->load(), uint64_t{1});
  close(fd);
}

namespace {

// A main thread that only checks for orders and sleeps.
struct Sleeper {
  WorkerPage page{};
  Word<uint64_t> head{0};
  Orders orders{page};
  std::atomic<uint64_t> rounds{0};
  std::thread thread{[this] {
    orders.begin_run();
    while (!orders.pending() || orders.obey()) {
      ++rounds;
      orders.sleep(head, 0);
    }
    orders.finish_run();
  }};
};

}  // namespace

TEST(an_order_reaches_a_sleeper) {
  for (int i = 0; i < 200; ++i) {
    Sleeper sleeper;
    int done = 0;
    sleeper.orders.while_parked([&] { done = 1; });
    EXPECT_EQ(done, 1);
    sleeper.orders.end();
    sleeper.thread.join();
  }
}

TEST(nothing_runs_while_the_gate_is_closed) {
  Sleeper sleeper;
  sleeper.orders.gate(false);
  sleeper.orders.while_parked([] {});  // parked from here on
  EXPECT_EQ(sleeper.page.gate_open.load(), 0u);
  const uint64_t before = sleeper.rounds;
  sleeper.head.store(1);
  futex_wake(low_half(sleeper.head));
  sleeper.orders.while_parked([&] { EXPECT_EQ(sleeper.rounds.load(), before); });
  sleeper.orders.gate(true);
  sleeper.orders.end();
  sleeper.thread.join();
}

TEST(nothing_runs_without_a_lease) {
  Sleeper sleeper;
  sleeper.orders.lease(7, false);
  sleeper.orders.await_parked();
  EXPECT_EQ(sleeper.page.gate_open.load(), 0u);
  EXPECT(sleeper.orders.leaves());
  const uint64_t before = sleeper.rounds;
  sleeper.orders.gate(true);      // is not enough
  sleeper.orders.lease(6, true);  // is stale
  sleeper.head.store(1);
  futex_wake(low_half(sleeper.head));
  sleeper.orders.while_parked([&] { EXPECT_EQ(sleeper.rounds.load(), before); });
  EXPECT_EQ(sleeper.page.gate_open.load(), 0u);
  sleeper.orders.lease(8, true);
  while (sleeper.rounds.load() == before) std::this_thread::yield();
  sleeper.orders.lease(7, false);  // is stale
  EXPECT(!sleeper.orders.pending());
  EXPECT(!sleeper.orders.leaves());
  sleeper.orders.gate(false);
  EXPECT(!sleeper.orders.leaves());  // it only has to wait, and keeps the device
  sleeper.orders.end();
  sleeper.thread.join();
}

TEST(a_replay_needs_no_lease) {
  Sleeper sleeper;
  sleeper.orders.lease(1, false);
  sleeper.orders.await_parked();
  const uint64_t before = sleeper.rounds;
  sleeper.orders.replaying(true);
  while (sleeper.rounds.load() == before) std::this_thread::yield();
  sleeper.orders.replaying(false);
  sleeper.orders.while_parked([] {});
  EXPECT(sleeper.orders.pending());
  EXPECT_EQ(sleeper.page.gate_open.load(), 0u);
  sleeper.orders.end();
  sleeper.thread.join();
}

TEST(work_that_fails_while_parked_lets_the_run_go_on) {
  Sleeper sleeper;
  EXPECT_THROWS(std::runtime_error,
                sleeper.orders.while_parked([] { throw std::runtime_error("no"); }));
  EXPECT(!sleeper.orders.pending());
  sleeper.orders.end();
  sleeper.thread.join();
}
