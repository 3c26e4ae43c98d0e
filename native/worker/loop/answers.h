// Answers to requests: written to the ring behind the worker's page, piece by piece.
//
// Note [Restarted answers]: a worker may die in the middle of an answer, and the worker that
// executes the request again may compute other bytes (a kernel that adds in any order). The client
// must get all bytes of one execution. So an answer that was given completely stays as it is, and
// one that was not is begun again: the worker withdraws `answer_position`, and counts
// `answer_generation` before it writes into the ring. The client checks the generation after each
// copy out of the ring; if it has changed, it takes the answer from its start. Its `answer_taken`
// refers to the generation that it names in its own page.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "oplog/codec.h"
#include "oplog/mapping.h"
#include "worker/exec/failures.h"
#include "worker/loop/orders.h"
#include "worker/state/exactness.h"

namespace sing {

// What a request was answered when it was executed before; a failure without its bytes.
struct Recorded {
  AnswerStatus status = AnswerStatus::ok;
  std::vector<std::byte> bytes;
};

// Reads the rest of an `answered` record, after its position. Throws CorruptLog.
Recorded get_recorded(Reader& in);

class Answers {
 public:
  // Writes the bytes of an answer from `offset` on.
  using Source = std::function<void(uint64_t offset, std::span<std::byte> into)>;

  // `log`: the ring, mapped twice in a row; none of both: in the fuzzer.
  Answers(const ClientPage& client, Page<WorkerPage>& page, Orders& orders,
          std::span<const std::byte> log = {}, Exactness* exactness = nullptr)
      : client_(client), page_(page), orders_(orders), log_(log), exactness_(exactness) {}

  // True if the client waits for the answer to the request that ends at `position`. A request that
  // is only replayed was answered long ago.
  bool wanted(uint64_t position) const noexcept {
    return client_.answer_wanted.load(std::memory_order_acquire) == position;
  }

  // What the request that ends at `position` was answered by an earlier worker, if the client uses
  // that: see Note [Recorded answers] in client/log/session.h.
  std::optional<Recorded> recorded(uint64_t position) const;

  // Sends the answer; does nothing if the client does not wait for it, or no longer does, or if an
  // earlier worker has given it. Returns false if the run is to end before the client has taken all
  // of it: the next worker then begins it again.
  bool send(uint64_t position, AnswerStatus status, uint64_t bytes, const Source& source);
  bool send(uint64_t position, AnswerStatus status, std::span<const std::byte> bytes);
  bool send(uint64_t position, const Failure& failure);

 private:
  enum class Wait { changed, abandoned, ended };
  Wait wait_taken(uint64_t position, uint64_t seen);
  // Bytes of the current generation that the client has taken.
  uint64_t taken() const noexcept;
  // Prepares the page for an answer. Returns false if an earlier worker has given it completely.
  bool begin(uint64_t position);
  void ring() noexcept;

  const ClientPage& client_;
  Page<WorkerPage>& page_;
  Orders& orders_;
  std::span<const std::byte> log_;
  Exactness* exactness_;
};

}  // namespace sing
