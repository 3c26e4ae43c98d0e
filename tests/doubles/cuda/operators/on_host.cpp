#include "operators/on_host.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>

#include "operators/operands.h"

// Of the runtime's double: the stream's next operation ends with a fault.
extern "C" void cuda_double_fault(int code, cudaStream_t stream);

namespace sing_double {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr int kAssert = 710;
// What a draw adds to a generator's offset; CUDA's kernels add as much as each thread draws.
constexpr uint64_t kDrawn = 4;

bool draws(const c10::OperatorHandle& op) {
  const auto& tags = op.getTags();
  return std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
}

// The host's generator, in a state that follows from that of the card's generator.
class Drawing {
 public:
  explicit Drawing(const Stack& arguments) : lock_(mutex()) {
    at::Generator card =
        at::globalContext().defaultGenerator(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice());
    for (const IValue& value : arguments) {
      if (value.isGenerator() && value.toGenerator().defined()) card = value.toGenerator();
    }
    host_ = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> guard(card.mutex());
    const std::lock_guard<std::mutex> host_guard(host_.mutex());
    before_ = host_.get_state();
    host_.set_current_seed(card.current_seed() * 0x9E3779B97F4A7C15 + card.get_offset());
    card.set_offset(card.get_offset() + kDrawn);
  }

  ~Drawing() {
    const std::lock_guard<std::mutex> guard(host_.mutex());
    host_.set_state(before_);
  }

  Drawing(const Drawing&) = delete;
  Drawing& operator=(const Drawing&) = delete;

 private:
  static std::mutex& mutex() {
    static auto* one = new std::mutex;
    return *one;
  }

  std::lock_guard<std::mutex> lock_;
  at::Generator host_;
  at::Tensor before_;
};

Stack called(const c10::OperatorHandle& op, const std::vector<IValue>& arguments,
             Operands& operands) {
  Stack on_host;
  for (const IValue& value : arguments) on_host.push_back(operands.to_host(value));
  std::optional<Drawing> drawing;
  if (draws(op)) {
    drawing.emplace(on_host);
    for (IValue& value : on_host) {
      if (value.isGenerator()) value = IValue();
    }
  }
  const Stack before = on_host;
  try {
    op.callBoxed(on_host);
  } catch (const c10::Error& error) {
    const std::string why = error.what_without_backtrace();
    if (why.find("out of range") == std::string::npos &&
        why.find("out of bounds") == std::string::npos) {
      throw;
    }
    operands.clear_indices();  // for the sizes of the results
    on_host = before;
    op.callBoxed(on_host);
    cuda_double_fault(kAssert, current_stream());
  }
  return on_host;
}

}  // namespace

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const at::AutoDispatchBelowAutograd guard;
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(count),
                                      stack->end());
  torch::jit::drop(*stack, count);
  Operands operands;
  for (const IValue& value : arguments) operands.note(value);
  const Stack results = called(op, arguments, operands);
  for (size_t index = 0; index < count; ++index) {
    const auto* alias = schema.arguments()[index].alias_info();
    if (alias && alias->isWrite()) operands.write_back(arguments[index]);
  }
  for (const IValue& value : results) {
    const at::Tensor original =
        value.isTensor() ? operands.original_of(value.toTensor()) : at::Tensor();
    stack->push_back(original.defined() ? IValue(original) : Operands::to_card(value));
  }
}

}  // namespace sing_double
