#include "worker/loop/answers.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "oplog/futex.h"
#include "worker/loop/spin.h"

namespace sing {

namespace {
constexpr std::chrono::milliseconds kTurning{20};
}  // namespace

Recorded get_recorded(Reader& in) {
  const auto status = in.get<AnswerStatus>();
  const auto bytes = in.get_bytes(in.get<uint32_t>());
  if (!in.ok() || status > AnswerStatus::error) throw CorruptLog("an answer that cannot be");
  return {status, {bytes.begin(), bytes.end()}};
}

void Answers::ring() noexcept {
  page_->bell.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (client_.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(&page_->bell);
}

uint64_t Answers::taken() const noexcept {
  const uint64_t generation = page_->answer_generation.load(std::memory_order_relaxed);
  if (client_.answer_generation.load(std::memory_order_acquire) != generation) return 0;
  return client_.answer_taken.load(std::memory_order_acquire);
}

Answers::Wait Answers::wait_taken(uint64_t position, uint64_t seen) {
  for (Spin spin(kSpins);;) {
    const uint64_t word = client_.answer_taken.load(std::memory_order_acquire);
    const uint64_t now = taken();
    if (now != seen) return Wait::changed;
    if (!wanted(position)) return Wait::abandoned;
    if (orders_.pending() && !orders_.obey()) return Wait::ended;
    if (spin.once()) continue;
    // A client that gives up changes both words, so that its wake-up cannot be missed. One that
    // turns to a new generation may set `word` to the same value again.
    orders_.sleep(client_.answer_taken, word,
                  word == now ? kForever : std::chrono::nanoseconds(kTurning));
  }
}

bool Answers::begin(uint64_t position) {
  WorkerPage& page = *page_;
  if (page.answer_position.load(std::memory_order_relaxed) != position) return true;
  if (page.answer_produced.load(std::memory_order_relaxed) ==
      page.answer_bytes.load(std::memory_order_relaxed)) {
    return false;
  }
  page.answer_position.store(0, std::memory_order_seq_cst);
  page.answer_generation.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return true;
}

std::optional<Recorded> Answers::recorded(uint64_t position) const {
  if (wanted(position)) {
    const WorkerPage& page = *page_;
    const uint64_t bytes = page.answer_bytes.load(std::memory_order_relaxed);
    if (page.answer_position.load(std::memory_order_relaxed) != position ||
        page.answer_produced.load(std::memory_order_relaxed) != bytes) {
      return std::nullopt;
    }
    const auto status = static_cast<AnswerStatus>(page.answer_status.load());
    const auto ring_bytes = page_.following().first(std::min<uint64_t>(bytes, kAnswerRingBytes));
    return Recorded{status, {ring_bytes.begin(), ring_bytes.end()}};
  }
  // Its record comes before the next request.
  const uint64_t head = client_.head.load(std::memory_order_acquire);
  const uint64_t capacity = log_.size() / 2;
  for (uint64_t at = position; at < head && head - at <= capacity;) {
    const std::byte* record = log_.data() + at % capacity;
    RecordHeader header;
    std::memcpy(&header, record, sizeof(header));
    if (!valid(header, head - at) || (header.flags & kRequest) != 0) return std::nullopt;
    if (header.kind == static_cast<uint8_t>(RecordKind::answered)) {
      Reader in({record + sizeof(header), header.bytes - sizeof(header)});
      const uint64_t answered = in.get<uint64_t>();
      Recorded found = get_recorded(in);
      if (answered == position) return found;
    }
    at += header.bytes;
  }
  return std::nullopt;
}

bool Answers::send(uint64_t position, AnswerStatus status, uint64_t bytes, const Source& source) {
  if (!wanted(position)) return true;
  if (!begin(position)) {
    ring();  // the worker that gave it may have died before it rang
    return true;
  }
  if (exactness_ != nullptr) exactness_->note_answer(*page_);  // before the client can read it
  page_->answer_status.store(static_cast<uint32_t>(status), std::memory_order_relaxed);
  page_->answer_bytes.store(bytes, std::memory_order_relaxed);
  uint64_t produced = 0;
  bool published = false;
  const auto ring_bytes = page_.following();
  while (!published || produced < bytes) {
    const uint64_t taken = this->taken();
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
