// The random number generators of a session, by the client's numbers. Number 0 is the device's
// default generator, which operators without a generator argument use.
//
// The CPU's default generator belongs to the process, which may execute several sessions: see
// `Seat`. So each session has values of its own for it, which are in it while the session executes.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "worker/exec/failures.h"

namespace sing {

class Generators {
 public:
  static constexpr uint32_t kCountMax = 1 << 16;

  // Puts number 0 into a fixed state: replay must not depend on the process.
  explicit Generators(c10::Device device);

  // The process' default generator gets this session's values, and gives them back. Between the
  // two, no other session executes.
  void enter();
  void leave();

  // Creates it at first use. Throws CorruptLog if the number is out of range.
  at::Generator& at(uint32_t number);
  void seed(uint32_t number, uint64_t seed);
  void copy(uint32_t number, uint32_t source);
  void free(uint32_t number);
  std::vector<std::byte> state(uint32_t number);
  // Raises torch's error if the state is invalid.
  void set_state(uint32_t number, std::span<const std::byte> state);

  // On a GPU: notes how far each was used, and puts them back there.
  void mark();
  void rewind();

  // The seed that was set last.
  uint64_t current_seed(uint32_t number);

  // Numbers of the existing generators, in order.
  std::vector<uint32_t> numbers() const;

 private:
  at::Generator make() const;

  c10::Device device_;
  std::vector<std::optional<at::Generator>> generators_;
  std::optional<at::Generator> own_;  // of the CPU: number 0 while the session does not execute
  std::vector<uint64_t> marks_;
};

}  // namespace sing
