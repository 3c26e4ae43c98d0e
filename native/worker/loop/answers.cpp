#include "worker/loop/answers.h"

#include <algorithm>
#include <cstring>

#include "oplog/futex.h"
#include "worker/loop/spin.h"

namespace sing {

void Answers::ring() noexcept {
  page_->bell.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (client_.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(&page_->bell);
}

Answers::Wait Answers::wait_taken(uint64_t position, uint64_t seen) {
  for (Spin spin(kSpins); client_.answer_taken.load(std::memory_order_acquire) == seen;) {
    if (!wanted(position)) return Wait::abandoned;
    if (orders_.pending() && !orders_.obey()) return Wait::ended;
    // A client that gives up changes both words, so that its wake-up cannot be missed.
    if (!spin.once()) orders_.sleep(client_.answer_taken, seen);
  }
  return Wait::changed;
}

bool Answers::send(uint64_t position, AnswerStatus status, uint64_t bytes, const Source& source) {
  if (!wanted(position)) return true;
  uint64_t produced = 0;
  bool published = page_->answer_position.load(std::memory_order_relaxed) == position;
  if (published) {
    // An earlier worker ended in the middle of this answer. Replay gives the same bytes, so the
    // bytes that it published are valid, and the client may be reading them at this moment.
    if (page_->answer_status.load(std::memory_order_relaxed) != static_cast<uint32_t>(status) ||
        page_->answer_bytes.load(std::memory_order_relaxed) != bytes) {
      throw CorruptLog("replay gave another answer than the one that was half given");
    }
    produced = page_->answer_produced.load(std::memory_order_relaxed);
    ring();  // that worker may have died before it rang
  } else {
    page_->answer_status.store(static_cast<uint32_t>(status), std::memory_order_relaxed);
    page_->answer_bytes.store(bytes, std::memory_order_relaxed);
  }
  const auto ring_bytes = page_.following();
  while (!published || produced < bytes) {
    const uint64_t taken = client_.answer_taken.load(std::memory_order_acquire);
    if (!wanted(position)) return true;
    if (taken > produced) throw CorruptLog("an answer was taken before it was given");
    const uint64_t at = produced % kAnswerRingBytes;
    const uint64_t count = std::min({kAnswerChunkBytes, bytes - produced, kAnswerRingBytes - at,
                                     kAnswerRingBytes - (produced - taken)});
    if (count == 0 && produced < bytes) {
      const Wait wait = wait_taken(position, taken);
      if (wait == Wait::abandoned) return true;
      if (wait == Wait::ended) return false;
      continue;
    }
    if (count != 0) source(produced, ring_bytes.subspan(at, count));
    produced += count;
    page_->answer_produced.store(produced, std::memory_order_release);
    if (!published) page_->answer_position.store(position, std::memory_order_release);
    published = true;
    ring();
  }
  return true;
}

bool Answers::send(uint64_t position, AnswerStatus status, std::span<const std::byte> bytes) {
  return send(position, status, bytes.size(), [&](uint64_t offset, std::span<std::byte> into) {
    std::memcpy(into.data(), bytes.data() + offset, into.size());
  });
}

bool Answers::send(uint64_t position, const Failure& failure) {
  Writer out;
  out.put(failure.kind);
  out.put<uint64_t>(failure.position);
  out.put_string(failure.operation);
  out.put_string(failure.message);
  return send(position, AnswerStatus::error, out.view());
}

}  // namespace sing
