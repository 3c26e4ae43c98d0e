// Operators of the asynchronous device: see Note [Asynchronous device].
#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "tests/device/backend.h"
#include "tests/device/copies.h"

namespace sing::test {

namespace {

using torch::jit::Stack;

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// Applies a function to the tensors in a value.
template <class Function>
c10::IValue mapped(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (!value.isList()) return value;
  const auto list = value.toList();
  c10::impl::GenericList made(list.elementType());
  for (size_t i = 0; i < list.size(); ++i) made.push_back(mapped(list.get(i), function));
  return made;
}

template <class Function>
void each_tensor(const c10::IValue& value, Function&& function) {
  mapped(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) function(tensor);
    return tensor;
  });
}

at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage) {
  const auto key = c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, storage.device());
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// Tensors of the meta device with the geometry of others; storages are shared as theirs are.
class Metas {
 public:
  at::Tensor operator()(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
    const c10::Device meta(c10::DeviceType::Meta);
    const void* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      c10::Storage made(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                        c10::DataPtr(nullptr, meta), c10::GetAllocator(c10::DeviceType::Meta),
                        /*resizable=*/true);
      found = storages_.emplace(storage, std::move(made)).first;
    }
    return with_storage(tensor, found->second);
  }

 private:
  std::unordered_map<const void*, c10::Storage> storages_;
};

struct Result {
  int written = -1;  // the argument that it is
  int viewed = -1;   // the argument of which it is a view
};

int argument_of(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias.beforeSets()) return static_cast<int>(i);
  }
  return -1;
}

std::vector<Result> results_of(const c10::FunctionSchema& schema) {
  std::vector<Result> results(schema.returns().size());
  for (size_t i = 0; i < results.size(); ++i) {
    const c10::AliasInfo* alias = schema.returns()[i].alias_info();
    if (alias == nullptr) continue;
    (alias->isWrite() ? results[i].written : results[i].viewed) = argument_of(schema, *alias);
  }
  return results;
}

class CallOnDevice {
 public:
  CallOnDevice(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), results_(results_of(schema_)) {
    const size_t count = schema_.arguments().size();
    operands_.assign(stack.end() - static_cast<int64_t>(count), stack.end());
    stack.resize(stack.size() - count);
    for (const c10::IValue& operand : operands_) {
      each_tensor(operand, [&](const at::Tensor& tensor) {
        if (!on_device(tensor)) return;
        device_ = &async_device_of(tensor);
        index_ = tensor.device().index();
      });
    }
    if (device_ == nullptr) device_ = &AsyncDevice::at(index_);
  }

  void run() {
    device_->check();
    if (!predict()) return run_now();
    if (all_views()) return push_views();
    Task task;
    std::vector<c10::IValue> fresh;
    for (size_t i = 0; i < results_.size(); ++i) {
      if (results_[i].written >= 0) {
        adapt_output(operands_[static_cast<size_t>(results_[i].written)], predicted_[i]);
        fresh.emplace_back();
      } else {
        fresh.push_back(mapped(predicted_[i], [&](const at::Tensor& tensor) {
          return tensor.defined()
                     ? at::empty_strided(tensor.sizes(), tensor.strides(),
                                         tensor.options().device(AsyncDevice::device(index_)))
                     : tensor;
        }));
      }
    }
    Stack operands = host_operands(task.uses);
    std::vector<c10::IValue> targets;
    for (const c10::IValue& result : fresh) {
      targets.push_back(mapped(result, [&](const at::Tensor& tensor) {
        return on_device(tensor) ? host_alias(tensor, task.uses) : tensor;
      }));
    }
    task.work = [op = op_, operands = std::move(operands), targets]() mutable {
      op.callBoxed(operands);
      for (size_t i = 0; i < targets.size(); ++i) store(operands[i], targets[i]);
      operands.clear();
      targets.clear();
    };
    task.kernel = true;
    task.cost_ns = device_->kernel_ns();
    device_->launch(current_stream(*device_), std::move(task));
    for (size_t i = 0; i < results_.size(); ++i) {
      const int written = results_[i].written;
      stack_.push_back(written >= 0 ? operands_[static_cast<size_t>(written)]
                                    : std::move(fresh[i]));
    }
  }

 private:
  // Computes the geometry of the results, or returns false if that depends on data, or is wrong.
  bool predict() {
    for (const c10::Argument& result : schema_.returns()) {
      const auto kind = result.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
    }
    if (draws() && !draws_in_place()) return false;
    Metas metas;
    Stack stack;
    for (const c10::IValue& operand : operands_) {
      if (operand.isGenerator()) {
        stack.emplace_back();
      } else if (operand.isDevice()) {
        stack.emplace_back(c10::Device(c10::DeviceType::Meta));
      } else {
        stack.push_back(mapped(operand, metas));
      }
    }
    try {
      op_.callBoxed(stack);
    } catch (const std::exception&) {
      return false;
    }
    predicted_.assign(stack.begin(), stack.end());
    return true;
  }

  bool all_views() const {
    return !results_.empty() && std::all_of(results_.begin(), results_.end(),
                                            [](const Result& one) { return one.viewed >= 0; });
  }

  void push_views() {
    for (size_t i = 0; i < results_.size(); ++i) {
      const at::Tensor base = operands_[static_cast<size_t>(results_[i].viewed)].toTensor();
      stack_.push_back(mapped(predicted_[i], [&](const at::Tensor& view) {
        return with_storage(view, base.storage());
      }));
    }
  }

  static void adapt_output(const c10::IValue& output, const c10::IValue& predicted) {
    if (!output.isTensor() || !predicted.isTensor()) return;
    const at::Tensor tensor = output.toTensor();
    if (tensor.sizes() != predicted.toTensor().sizes()) {
      tensor.resize_(predicted.toTensor().sizes());
    }
  }

  static void store(const c10::IValue& made, const c10::IValue& target) {
    if (target.isNone()) return;
    if (target.isTensor()) {
      if (target.toTensor().defined()) target.toTensor().copy_(made.toTensor());
      return;
    }
    for (size_t i = 0; i < target.toList().size(); ++i) {
      store(made.toList().get(i), target.toList().get(i));
    }
  }

  // --- random numbers: those of the CPU's generator, whose state is that after the launch
  bool draws() const {
    return std::any_of(schema_.arguments().begin(), schema_.arguments().end(), [](const auto& one) {
      return one.type()->repr_str().find("Generator") != std::string::npos;
    });
  }
  bool draws_in_place() const {
    size_t tensors = 0;
    for (const c10::IValue& operand : operands_) {
      each_tensor(operand, [&](const at::Tensor&) { ++tensors; });
    }
    return tensors == 1 && results_.size() == 1 && results_[0].written == 0;
  }
  c10::IValue host_generator_of(const c10::IValue& value) const {
    return host_generator(value.isNone() ? std::nullopt : std::optional(value.toGenerator()),
                          index_);
  }
  bool takes_generator(size_t i) const {
    return schema_.arguments()[i].type()->repr_str().find("Generator") != std::string::npos;
  }

  Stack host_operands(std::vector<DeviceBlockPtr>& uses) {
    Stack stack;
    for (size_t i = 0; i < operands_.size(); ++i) {
      const c10::IValue& operand = operands_[i];
      if (takes_generator(i)) {
        const at::Generator generator = host_generator_of(operand).toGenerator();
        at::Generator before = generator.clone();
        draw_on_host(generator);
        stack.emplace_back(std::move(before));
      } else {
        stack.push_back(host_operand(operand, uses));
      }
    }
    return stack;
  }

  c10::IValue host_operand(const c10::IValue& operand, std::vector<DeviceBlockPtr>& uses) const {
    if (operand.isDevice()) return c10::Device(c10::DeviceType::CPU);
    return mapped(operand, [&](const at::Tensor& tensor) {
      return on_device(tensor) ? host_alias(tensor, uses) : tensor;
    });
  }

  // Advances the generator as the kernel will.
  void draw_on_host(const at::Generator& generator) const {
    Stack stack;
    for (size_t i = 0; i < operands_.size(); ++i) {
      if (takes_generator(i)) {
        stack.emplace_back(generator);
      } else {
        stack.push_back(mapped(operands_[i], [](const at::Tensor& tensor) {
          return at::empty_strided(tensor.sizes(), tensor.strides(),
                                   tensor.options().device(at::kCPU));
        }));
      }
    }
    op_.callBoxed(stack);
  }

  // Waits for the stream and executes the call in this thread.
  void run_now() {
    Task launch;  // for the counts, and scripted faults
    launch.kernel = true;
    launch.cost_ns = device_->kernel_ns();
    device_->launch(current_stream(*device_), std::move(launch));
    device_->synchronize(current_stream(*device_));
    Copies copies;
    Stack stack;
    std::vector<std::pair<at::Tensor, at::Tensor>> outputs;  // of the device, and the CPU's
    for (size_t i = 0; i < operands_.size(); ++i) {
      if (takes_generator(i)) {
        stack.push_back(host_generator_of(operands_[i]));
      } else if (schema_.arguments()[i].is_out() && operands_[i].isTensor()) {
        const at::Tensor output = operands_[i].toTensor();
        outputs.emplace_back(output, at::empty({0}, output.options().device(at::kCPU)));
        stack.emplace_back(outputs.back().second);
      } else {
        stack.push_back(copied(operands_[i], copies));
      }
    }
    op_.callBoxed(stack);
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < results_.size(); ++i) {
      const int written = results_[i].written;
      if (written >= 0) {
        results.push_back(operands_[static_cast<size_t>(written)]);
      } else {
        results.push_back(mapped(stack[i], [&](const at::Tensor& made) {
          return made.defined() ? to_device(made, index_) : made;
        }));
      }
    }
    for (auto& [output, made] : outputs) {
      if (output.sizes() != made.sizes()) {
        output.resize_(made.sizes());
        output.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
      }
      output.copy_(made);
    }
    for (const auto& [data, copy] : copies) std::memcpy(data, copy.data(), copy.nbytes());
    for (c10::IValue& result : results) stack_.push_back(std::move(result));
  }

  // By the bytes on the device. A kernel changes nothing before it has memory for its results.
  using Copies = std::unordered_map<void*, c10::Storage>;
  c10::IValue copied(const c10::IValue& operand, Copies& copies) const {
    std::vector<DeviceBlockPtr> uses;
    return mapped(host_operand(operand, uses), [&](const at::Tensor& tensor) {
      if (!tensor.defined() || uses.empty()) return tensor;
      const c10::Storage& from = tensor.storage();
      c10::Storage& copy = copies[from.mutable_data()];
      if (!copy) {
        copy = c10::Storage(c10::Storage::use_byte_size_t(), from.nbytes(), c10::GetCPUAllocator());
        std::memcpy(copy.mutable_data(), from.data(), from.nbytes());
      }
      return with_storage(tensor, copy);
    });
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  const std::vector<Result> results_;
  std::vector<c10::IValue> operands_, predicted_;
  AsyncDevice* device_ = nullptr;
  int index_ = 0;
};

void run_boxed(const c10::OperatorHandle& op, Stack* stack) { CallOnDevice(op, *stack).run(); }

}  // namespace

at::Tensor host_alias(const at::Tensor& tensor, std::vector<DeviceBlockPtr>& uses) {
  if (DeviceBlockPtr block = block_of(tensor.storage())) uses.push_back(std::move(block));
  void* data = const_cast<void*>(tensor.storage().data());
  return with_storage(tensor,
                      c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                                   c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)), nullptr,
                                   /*resizable=*/false));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
}

}  // namespace sing::test
