#include "worker/exec/generators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace sing {

namespace {

void copy_state(at::Generator& from, at::Generator& to) {
  at::Tensor state;
  {
    const std::lock_guard lock(from.mutex());
    state = from.get_state();
  }
  const std::lock_guard lock(to.mutex());
  to.set_state(state);
}

}  // namespace

Generators::Generators(c10::Device device) : device_(device) {
  generators_.push_back(device.is_cpu() ? make() : at::globalContext().defaultGenerator(device));
  seed(0, c10::default_rng_seed_val);
}

void Generators::enter() {
  if (!device_.is_cpu() || own_) return;
  own_ = std::exchange(generators_[0], at::globalContext().defaultGenerator(device_));
  copy_state(*own_, *generators_[0]);
}

void Generators::leave() {
  if (!own_) return;
  copy_state(*generators_[0], *own_);
  generators_[0] = std::exchange(own_, std::nullopt);
}

at::Generator Generators::make() const {
  if (device_.type() == c10::DeviceType::CPU) return at::detail::createCPUGenerator();
  return at::globalContext()
      .getAcceleratorHooksInterface(device_.type())
      .getNewGenerator(device_.index());
}

at::Generator& Generators::at(uint32_t number) {
  if (number >= kCountMax) throw CorruptLog("a generator's number is out of range");
  if (number >= generators_.size()) generators_.resize(number + 1);
  auto& generator = generators_[number];
  if (!generator) generator = make();
  return *generator;
}

void Generators::seed(uint32_t number, uint64_t seed) {
  at::Generator& generator = at(number);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

void Generators::copy(uint32_t number, uint32_t source) { set_state(number, state(source)); }

void Generators::free(uint32_t number) {
  if (number != 0 && number < generators_.size()) generators_[number].reset();
}

std::vector<std::byte> Generators::state(uint32_t number) {
  at::Generator& generator = at(number);
  std::lock_guard<std::mutex> lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  std::vector<std::byte> bytes(state.nbytes());
  std::memcpy(bytes.data(), state.const_data_ptr(), bytes.size());
  return bytes;
}

void Generators::set_state(uint32_t number, std::span<const std::byte> state) {
  at::Generator& generator = at(number);
  const at::Tensor bytes = at::empty({static_cast<int64_t>(state.size())}, at::kByte);
  if (!state.empty()) std::memcpy(bytes.mutable_data_ptr(), state.data(), state.size());
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(bytes);
}

void Generators::mark() {
  marks_.clear();
  for (const auto& generator : generators_) {
    marks_.push_back(generator ? generator->unsafeGetGeneratorImpl()->get_offset() : 0);
  }
}

void Generators::rewind() {
  for (size_t i = 0; i < marks_.size(); ++i) {
    if (!generators_[i]) continue;
    std::lock_guard<std::mutex> lock(generators_[i]->mutex());
    generators_[i]->set_offset(marks_[i]);
  }
}

uint64_t Generators::current_seed(uint32_t number) {
  at::Generator& generator = at(number);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.current_seed();
}

std::vector<uint32_t> Generators::numbers() const {
  std::vector<uint32_t> numbers;
  for (uint32_t i = 0; i < generators_.size(); ++i) {
    if (generators_[i]) numbers.push_back(i);
  }
  return numbers;
}

}  // namespace sing
