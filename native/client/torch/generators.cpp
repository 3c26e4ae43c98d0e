#include "client/torch/generators.h"

#include <atomic>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include "client/ops/tensors.h"

namespace sing::client {

namespace {

Writer generator_record(uint32_t number, GeneratorAction action) {
  Writer out;
  out.put<uint32_t>(number);
  out.put<uint8_t>(static_cast<uint8_t>(action));
  for (int i = 0; i < 3; ++i) out.put<uint8_t>(0);
  return out;
}

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(uint32_t number, c10::DeviceIndex label)
      : GeneratorImpl(c10::Device(kDevice, label), kKeys), number_(number) {}

  ~DeviceGenerator() override {
    if (number_ == 0 || made_in_ != generation || !Session::connected()) return;
    Writer out = generator_record(number_, GeneratorAction::free);
    try {
      Session::get().append(RecordKind::generator, out.view());
    } catch (const std::exception&) {
      // The session has ended, and with it the generator.
    }
  }

  static c10::DeviceType device_type() { return kDevice; }
  uint32_t number() const {
    TORCH_CHECK(number_ == 0 || made_in_ == generation,
                "this generator belongs to the process from which this one was forked");
    return number_;
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    ++seedings_;
    // A seed is no use of the device: each child of a DataLoader sets it.
    if (number() == 0 && !Session::connected()) return;
    tell_seed();
  }
  void tell_seed() const {
    Writer out = generator_record(number_, GeneratorAction::seed);
    out.put<uint64_t>(seed_);
    Session::get().append(RecordKind::generator, out.view());
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seedings() const { return seedings_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  // A GPU's state is a seed and an offset. The software device has the CPU's generator, and raises
  // its error.
  void set_offset(uint64_t offset) override {
    ++seedings_;
    auto bytes = state_bytes();
    check_offset(bytes);
    std::memcpy(bytes.data() + sizeof(uint64_t), &offset, sizeof(offset));
    put_state(bytes);
  }
  uint64_t get_offset() const override {
    const auto bytes = state_bytes();
    check_offset(bytes);
    uint64_t offset = 0;
    std::memcpy(&offset, bytes.data() + sizeof(uint64_t), sizeof(offset));
    return offset;
  }

  void set_state(const c10::TensorImpl& state) override {
    ++seedings_;
    TORCH_CHECK_TYPE(state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.is_contiguous() &&
                         state.device().is_cpu(),
                     "RNG state must be a torch.ByteTensor");
    const auto* bytes = static_cast<const std::byte*>(state.data());
    put_state({bytes, static_cast<size_t>(state.numel())});
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const auto bytes = state_bytes();
    at::Tensor state =
        at::empty({static_cast<int64_t>(bytes.size())}, at::TensorOptions(at::kByte));
    std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
    return state.getIntrusivePtr();
  }

 private:
  DeviceGenerator* clone_impl() const override;

  std::vector<std::byte> state_bytes() const {
    Writer out = generator_record(number(), GeneratorAction::get_state);
    return Session::get().request(RecordKind::generator, out.view());
  }
  void put_state(std::span<const std::byte> bytes) const {
    Writer out = generator_record(number(), GeneratorAction::set_state);
    out.put<uint64_t>(bytes.size());
    Session::get().append(RecordKind::generator, out.view(), bytes);
    // If the state is refused, the error must be raised here, not later.
    Session::get().synchronize();
  }
  static void check_offset(const std::vector<std::byte>& bytes) {
    TORCH_CHECK(bytes.size() == 2 * sizeof(uint64_t),
                "a software device's Generator does not use offset");
  }

  const uint32_t number_;
  const uint32_t made_in_ = generation;
  uint64_t seed_ = c10::default_rng_seed_val;
  std::atomic<uint64_t> seedings_{0};
};

std::atomic<uint32_t> next_number{1};

void append_copy(uint32_t number, uint32_t source) {
  Writer out = generator_record(number, GeneratorAction::copy);
  out.put<uint32_t>(source);
  Session::get().append(RecordKind::generator, out.view());
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto* copy = new DeviceGenerator(next_number++, device().index());
  copy->seed_ = seed_;
  append_copy(copy->number_, number());
  return copy;
}

uint32_t spare() {
  static const uint32_t number = next_number++;
  return number;
}

}  // namespace

void keep_default_generator() { append_copy(spare(), 0); }
void put_back_default_generator() { append_copy(0, spare()); }

const at::Generator& default_generator() {
  static const auto* generator = new at::Generator(c10::make_intrusive<DeviceGenerator>(0u, 0));
  return *generator;
}

uint64_t default_seedings() {
  return static_cast<const DeviceGenerator*>(default_generator().unsafeGetGeneratorImpl())
      ->seedings();
}

void tell_default_generator() {
  const auto* ours =
      dynamic_cast<const DeviceGenerator*>(default_generator().unsafeGetGeneratorImpl());
  if (ours != nullptr && ours->current_seed() != c10::default_rng_seed_val) ours->tell_seed();
}

at::Generator new_generator(c10::DeviceIndex label) {
  const c10::DeviceIndex index = label >= 0 ? label : current_label;
  auto generator = at::Generator(c10::make_intrusive<DeviceGenerator>(next_number++, index));
  generator.set_current_seed(c10::default_rng_seed_val);
  return generator;
}

uint32_t generator_number(const at::Generator& generator) {
  const auto* ours = dynamic_cast<const DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours != nullptr, "Expected a 'cuda' device type for generator but found '",
              generator.device().type(), "'");
  return ours->number();
}

}  // namespace sing::client
