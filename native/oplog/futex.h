// Futex waits on words that several processes map. Independent of torch.
//
// All futexes are shared ones (never FUTEX_PRIVATE): the waiter and the waker are in different
// processes. Waiting and waking need only a readable mapping, so a process may wait on a word that
// it must not change.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <climits>
#include <ctime>

#include "oplog/layout.h"

namespace sing {

enum class Woken {
  woken,    // or spuriously: the caller checks again in any case
  changed,  // the word did not hold `expected`
  timed_out,
  interrupted,  // a signal handler ran
};

inline constexpr std::chrono::nanoseconds kForever = std::chrono::nanoseconds::max();

// Sleeps while *word == expected, for at most `timeout`.
inline Woken futex_wait(const Word<uint32_t>* word, uint32_t expected,
                        std::chrono::nanoseconds timeout = kForever) noexcept {
  timespec limit{};
  if (timeout != kForever) {
    const auto left = timeout.count() > 0 ? timeout.count() : 0;
    limit.tv_sec = left / 1'000'000'000;
    limit.tv_nsec = left % 1'000'000'000;
  }
  const long result = syscall(SYS_futex, word, FUTEX_WAIT, expected,
                              timeout == kForever ? nullptr : &limit, nullptr, 0);
  if (result == 0) return Woken::woken;
  if (errno == ETIMEDOUT) return Woken::timed_out;
  if (errno == EINTR) return Woken::interrupted;
  return Woken::changed;
}

// Wakes up to `count` waiters and returns how many there were.
inline int futex_wake(const Word<uint32_t>* word, int count = INT_MAX) noexcept {
  const long woken = syscall(SYS_futex, word, FUTEX_WAKE, count, nullptr, nullptr, 0);
  return woken > 0 ? static_cast<int>(woken) : 0;
}

// The half of a 64-bit word that changes with every change of the word: futexes are 32 bits wide.
inline const Word<uint32_t>* low_half(const Word<uint64_t>& word) noexcept {
  static_assert(std::endian::native == std::endian::little);
  static_assert(sizeof(Word<uint64_t>) == 8 && sizeof(Word<uint32_t>) == 4);
  return reinterpret_cast<const Word<uint32_t>*>(&word);
}

}  // namespace sing
