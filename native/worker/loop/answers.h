// Answers to requests: written to the ring behind the worker's page, piece by piece.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>

#include "oplog/codec.h"
#include "oplog/mapping.h"
#include "worker/exec/failures.h"
#include "worker/loop/orders.h"

namespace sing {

class Answers {
 public:
  // Writes the bytes of an answer from `offset` on.
  using Source = std::function<void(uint64_t offset, std::span<std::byte> into)>;

  Answers(const ClientPage& client, Page<WorkerPage>& page, Orders& orders)
      : client_(client), page_(page), orders_(orders) {}

  // Whether somebody waits for the answer of the request that ends at `position`. The answer to a
  // request that is only replayed was given long ago.
  bool wanted(uint64_t position) const noexcept {
    return client_.answer_wanted.load(std::memory_order_acquire) == position;
  }

  // Gives the answer, unless nobody waits for it (any longer). False: the run is to end before
  // all of it was taken, and the next worker has to take it up.
  bool send(uint64_t position, AnswerStatus status, uint64_t bytes, const Source& source);
  bool send(uint64_t position, AnswerStatus status, std::span<const std::byte> bytes);
  bool send(uint64_t position, const Failure& failure);

 private:
  enum class Wait { changed, abandoned, ended };
  Wait wait_taken(uint64_t position, uint64_t seen);
  void ring() noexcept;

  const ClientPage& client_;
  Page<WorkerPage>& page_;
  Orders& orders_;
};

}  // namespace sing
