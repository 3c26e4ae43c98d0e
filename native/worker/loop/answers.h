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

  // True if the client waits for the answer to the request that ends at `position`. A request that
  // is only replayed was answered long ago.
  bool wanted(uint64_t position) const noexcept {
    return client_.answer_wanted.load(std::memory_order_acquire) == position;
  }

  // Sends the answer; does nothing if the client does not wait for it, or no longer does. Returns
  // false if the run is to end before the client has taken all of it: the next worker then
  // continues it.
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
