// Spins for a short while before a futex sleep, whose wake-up costs tens of microseconds.
#pragma once

namespace sing {

// About 30 us on current x86 and ARM cores.
inline constexpr int kSpins = 1000;
// The worker's own compute threads (and the notebook) need the cores that spinning would use.
inline constexpr int kSpinsWithThreads = 200;

inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

class Spin {
 public:
  explicit Spin(int count) noexcept : left_(count) {}
  // Spins once. Returns false when it is time to sleep.
  bool once() noexcept {
    if (left_ <= 0) return false;
    --left_;
    relax();
    return true;
  }

 private:
  int left_;
};

}  // namespace sing
