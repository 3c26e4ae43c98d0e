#include "device/stream.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <string>
#include <thread>

#include "device/card.h"

namespace sing_double {
namespace {

constexpr int kCards = 4;
constexpr uint64_t kLagNs = 200'000;
constexpr int kMemoryAllocation = 2;

uint64_t lag_ns() {
  static const char* given = getenv("CUDA_DOUBLE_LAG_US");
  static const uint64_t lag = given ? strtoull(given, nullptr, 10) * 1000 : kLagNs;
  return lag;
}

struct Contexts {
  std::mutex mutex;
  std::atomic<Context*> made[kCards] = {};
};

Contexts& contexts() {
  static auto* all = new Contexts;
  return *all;
}

void sleep_until(uint64_t ns) {
  const struct timespec at = {static_cast<time_t>(ns / 1'000'000'000),
                              static_cast<long>(ns % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) != 0) {
  }
}

// In processes with torch, the library that computes its operators, if the test wants it.
void load_operators() {
  const char* library = getenv("CUDA_DOUBLE_OPERATORS");
  if (!library || !dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) return;
  if (!dlopen(library, RTLD_NOW)) note("unsupported", dlerror());
}

}  // namespace

std::atomic<bool> bad_fork{false};

uint64_t now_ns() {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void Moment::pass() {
  const std::lock_guard<std::mutex> guard(mutex);
  done = true;
  ns = now_ns();
  passed.notify_all();
}

void Moment::wait() {
  std::unique_lock<std::mutex> guard(mutex);
  passed.wait(guard, [this] { return done; });
}

Stream::Stream(int card, unsigned flags, int priority)
    : card(card), flags(flags), priority(priority) {
  sigset_t all, before;  // signals are for the program's own threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { run(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Stream::enqueue(Work work) {
  const std::lock_guard<std::mutex> guard(mutex_);
  items_.push_back({std::move(work), now_ns() + lag_ns()});
  changed_.notify_all();
}

void Stream::compute(Work work) {
  enqueue(
      [work = std::move(work), context = context_of(card)] { return context->fault ? 0 : work(); });
}

std::shared_ptr<Moment> Stream::record() {
  auto moment = std::make_shared<Moment>();
  enqueue([moment] {
    moment->pass();
    return 0;
  });
  return moment;
}

void Stream::wait_for(std::shared_ptr<Moment> moment) {
  enqueue([moment] {
    moment->wait();
    return 0;
  });
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> guard(mutex_);
  changed_.wait(guard, [this] { return items_.empty() && !busy_; });
}

bool Stream::idle() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return items_.empty() && !busy_;
}

void Stream::end() {
  const std::lock_guard<std::mutex> guard(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void Stream::run() {
  std::unique_lock<std::mutex> guard(mutex_);
  while (true) {
    changed_.wait(guard, [this] { return !items_.empty() || ended_; });
    if (items_.empty()) {
      guard.unlock();
      delete this;
      return;
    }
    Item item = std::move(items_.front());
    items_.pop_front();
    busy_ = true;
    guard.unlock();
    sleep_until(item.not_before);
    const uint64_t begun = now_ns();
    const int code = item.work();
    if (code) lose(card, code, "");
    item.work = nullptr;
    __atomic_fetch_add(&cards()[card].state->busy_ns, now_ns() - begun, __ATOMIC_RELAXED);
    guard.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

Context* context_of(int card) {
  return card < 0 || card >= kCards ? nullptr : contexts().made[card].load();
}

int make_context(int card) {
  if (context_of(card)) return 0;
  std::unique_lock<std::mutex> guard(contexts().mutex);
  if (context_of(card)) return 0;
  if (!charge(card, static_cast<int64_t>(cards()[card].context), 0)) return kMemoryAllocation;
  note("context", std::to_string(card));
  auto* context = new Context;
  context->streams.push_back(new Stream(card, 0, 0));
  contexts().made[card] = context;
  guard.unlock();
  load_operators();
  return 0;
}

void synchronize_card(int card) {
  Context* context = context_of(card);
  if (!context) return;
  std::deque<Stream*> streams;
  {
    const std::lock_guard<std::mutex> guard(context->mutex);
    streams = context->streams;
  }
  for (Stream* stream : streams) stream->synchronize();
}

void destroy(Stream* stream) {
  Context* context = context_of(stream->card);
  {
    const std::lock_guard<std::mutex> guard(context->mutex);
    auto& streams = context->streams;
    streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
  }
  stream->end();
}

void lose(int card, int code, const std::string& why) {
  Context* context = context_of(card);
  int none = 0;
  if (context && context->fault.compare_exchange_strong(none, code)) {
    note("fault", std::to_string(code) + " " + why);
  }
}

}  // namespace sing_double
