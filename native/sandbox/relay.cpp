#include "sandbox/relay.h"

namespace sing::sandbox {
namespace {

constexpr int kFinishMilliseconds = 2000;

}  // namespace

pollfd Relay::waits_for() const {
  if (begin_ < end_) return {target_, POLLOUT, 0};
  return {source_ ? source_.get() : -1, POLLIN, 0};
}

void Relay::proceed(short found) {
  if (found == 0) return;
  if (begin_ < end_) {
    drain();
  } else if (!fill()) {
    source_.reset();
  }
}

void Relay::finish() {
  for (;;) {
    pollfd waits = waits_for();
    const bool writes = begin_ < end_;
    if (poll(&waits, 1, writes ? kFinishMilliseconds : 0) <= 0) return;
    if (writes) {
      drain();
    } else if (!fill()) {
      return;
    }
  }
}

bool Relay::fill() {
  const ssize_t count = retried([&] { return read(source_.get(), bytes_, sizeof bytes_); });
  if (count <= 0) return false;
  begin_ = 0;
  end_ = static_cast<size_t>(count);
  return true;
}

void Relay::drain() {
  const ssize_t count = retried([&] { return write(target_, bytes_ + begin_, end_ - begin_); });
  if (count < 0 && errno == EAGAIN) return;
  // The reader is gone: discard the output, without an error for its writer.
  begin_ = count < 0 ? end_ : begin_ + static_cast<size_t>(count);
}

}  // namespace sing::sandbox
