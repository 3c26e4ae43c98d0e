#include "client/families/recurrent.h"

#include <map>
#include <mutex>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/_cudnn_init_dropout_state.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gru_native.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/rnn_relu_native.h>
#include <ATen/ops/rnn_tanh_native.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "client/log/forks.h"
#include "client/log/session.h"
#include "client/ops/tensors.h"
#include "client/torch/generators.h"

namespace sing::client {

namespace {

using Lstm = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Rnn = std::tuple<at::Tensor, at::Tensor>;

constexpr int64_t kLstm = 2;  // of ideep::rnn_kind
// Values of cudnnRNNMode_t.
enum CudnnMode : int64_t { kCudnnRelu = 0, kCudnnTanh = 1, kCudnnLstm = 2, kCudnnGru = 3 };

bool all_on_device(at::TensorList tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return on_device(tensor); });
}

// The conditions of use_mkldnn() in ATen/native/RNN.cpp, for single precision. Invalid operands are
// left to torch, which raises its own error.
bool uses_onednn(const at::Tensor& input, at::TensorList state, at::TensorList weights,
                 bool has_biases, int64_t layers, bool bidirectional) {
  const size_t cells = static_cast<size_t>(layers) * (bidirectional ? 2 : 1);
  return Session::get().software() && at::globalContext().userEnabledMkldnn() &&
         at::globalContext().hasMKLDNN() && input.dim() == 3 && input.numel() != 0 &&
         input.scalar_type() == at::kFloat && state.size() == 2 && state[0].dim() == 3 &&
         state[0].sizes() == state[1].sizes() && weights.size() == cells * (has_biases ? 4 : 2) &&
         all_on_device(weights) && all_on_device(state);
}

// A network for cuDNN.
struct Network {
  CudnnMode mode;
  const at::Tensor& input;
  at::TensorList state;
  at::TensorList weights;
  bool has_biases;
  int64_t layers;
  double dropout;
  bool train;
  bool bidirectional;
  bool batch_first = false;
  at::Tensor batch_sizes = {};  // of packed sequences, on the host

  bool is_packed() const { return batch_sizes.defined(); }
};

// The conditions of cudnn_is_acceptable() in ATen/native/cudnn; as above, invalid operands are left
// to torch.
bool uses_cudnn(const Network& net) {
  const auto dtype = net.input.scalar_type();
  const size_t states = net.mode == kCudnnLstm ? 2 : 1;
  if (Session::get().software() || !at::globalContext().userEnabledCuDNN() ||
      net.state.size() != states ||
      (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kHalf) ||
      net.input.dim() != (net.is_packed() ? 2 : 3) || net.input.numel() == 0 ||
      !all_on_device(net.weights) || !all_on_device(net.state)) {
    return false;
  }
  if (net.is_packed() &&
      (net.batch_sizes.dim() != 1 || net.batch_sizes.scalar_type() != at::kLong ||
       !net.batch_sizes.is_cpu() || !net.batch_sizes.is_contiguous())) {
    return false;
  }
  for (const at::Tensor& each : net.state) {
    if (each.dim() != 3 || each.scalar_type() != dtype) return false;
  }
  const bool projected = states == 2 && net.state[0].size(2) != net.state[1].size(2);
  const size_t cells = static_cast<size_t>(net.layers) * (net.bidirectional ? 2 : 1);
  return net.weights.size() == cells * ((net.has_biases ? 4 : 2) + (projected ? 1 : 0));
}

std::mutex states_mutex;
const HeldAtFork held_states(states_mutex);

struct DropoutState {
  uint64_t seedings = 0;
  at::Tensor buffer;
};

// State from which cuDNN draws its dropout. As in torch, the device's generator gives it a seed,
// and it is kept until that generator gets another state.
at::Tensor dropout_state(const at::Tensor& input, double dropout, bool train) {
  if (dropout == 0 || !train) return {};
  // By the process, as forked children have these tensors, too: Note [Opening] in session.h.
  static auto* const states = new std::map<uint32_t, DropoutState>();
  const uint64_t seedings = default_seedings();
  {
    std::lock_guard lock(states_mutex);
    const auto known = states->find(generation);
    if (known != states->end() && known->second.seedings == seedings) return known->second.buffer;
  }
  const auto seed =
      at::empty({}, input.options().dtype(at::kLong)).random_(default_generator()).item<int64_t>();
  const at::Tensor fresh =
      at::_cudnn_init_dropout_state(dropout, train, seed, input.options().dtype(at::kByte));
  std::lock_guard lock(states_mutex);
  return ((*states)[generation] = {seedings, fresh}).buffer;
}

Lstm cudnn(const Network& net) {
  const at::Tensor hx = net.state[0].contiguous();
  std::optional<at::Tensor> cx;
  int64_t width = hx.size(2), projected = 0;
  if (net.state.size() == 2) {
    cx = net.state[1].contiguous();
    if (cx->size(2) != width) projected = std::exchange(width, cx->size(2));
  }
  const at::IntArrayRef sizes = net.is_packed()
                                    ? at::IntArrayRef(net.batch_sizes.data_ptr<int64_t>(),
                                                      static_cast<size_t>(net.batch_sizes.numel()))
                                    : at::IntArrayRef();
  auto [output, hy, cy, reserve, buffer] = at::_cudnn_rnn(
      net.input, net.weights, (net.has_biases ? 4 : 2) + (projected != 0 ? 1 : 0), std::nullopt, hx,
      cx, net.mode, width, projected, net.layers, net.batch_first, net.dropout, net.train,
      net.bidirectional, sizes, dropout_state(net.input, net.dropout, net.train));
  return {output, hy, cy};
}

// Networks with one state: by cuDNN, or as torch's own kernel computes them.
using Padded = Rnn (*)(const at::Tensor& input, const at::Tensor& state, at::TensorList weights,
                       bool has_biases, int64_t layers, double dropout, bool train,
                       bool bidirectional, bool batch_first);
using Packed = Rnn (*)(const at::Tensor& data, const at::Tensor& batch_sizes,
                       const at::Tensor& state, at::TensorList weights, bool has_biases,
                       int64_t layers, double dropout, bool train, bool bidirectional);

template <CudnnMode mode, Padded native>
Rnn padded(const at::Tensor& input, const at::Tensor& state, at::TensorList weights,
           bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional,
           bool batch_first) {
  const Network net{mode,   input,   state, weights,       has_biases,
                    layers, dropout, train, bidirectional, batch_first};
  if (!uses_cudnn(net)) {
    return native(input, state, weights, has_biases, layers, dropout, train, bidirectional,
                  batch_first);
  }
  auto [output, hy, none] = cudnn(net);
  return {output, hy};
}

template <CudnnMode mode, Packed native>
Rnn packed(const at::Tensor& data, const at::Tensor& batch_sizes, const at::Tensor& state,
           at::TensorList weights, bool has_biases, int64_t layers, double dropout, bool train,
           bool bidirectional) {
  const Network net{mode,    data,  state,         weights, has_biases, layers,
                    dropout, train, bidirectional, false,   batch_sizes};
  if (!uses_cudnn(net)) {
    return native(data, batch_sizes, state, weights, has_biases, layers, dropout, train,
                  bidirectional);
  }
  auto [output, hy, none] = cudnn(net);
  return {output, hy};
}

Lstm lstm_packed(const at::Tensor& data, const at::Tensor& batch_sizes, at::TensorList state,
                 at::TensorList weights, bool has_biases, int64_t layers, double dropout,
                 bool train, bool bidirectional) {
  const Network net{kCudnnLstm, data,  state,         weights, has_biases, layers,
                    dropout,    train, bidirectional, false,   batch_sizes};
  if (uses_cudnn(net)) return cudnn(net);
  return at::native::lstm(data, batch_sizes, state, weights, has_biases, layers, dropout, train,
                          bidirectional);
}

Lstm lstm(const at::Tensor& input, at::TensorList state, at::TensorList weights, bool has_biases,
          int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  const Network net{kCudnnLstm, input,   state, weights,       has_biases,
                    layers,     dropout, train, bidirectional, batch_first};
  if (uses_cudnn(net)) return cudnn(net);
  if (!uses_onednn(input, state, weights, has_biases, layers, bidirectional)) {
    return at::native::lstm(input, state, weights, has_biases, layers, dropout, train,
                            bidirectional, batch_first);
  }
  // Iterates over layers and directions like mkldnn_rnn() in ATen/native/mkldnn/RNN.cpp.
  const size_t directions = bidirectional ? 2 : 1;
  const size_t stride = has_biases ? 4 : 2;
  const at::Tensor hidden = state[0].contiguous(), memory = state[1].contiguous();
  at::Tensor layer_input = (batch_first ? input.transpose(0, 1) : input).contiguous();
  std::vector<at::Tensor> last_hidden, last_memory;
  for (int64_t layer = 0; layer < layers; ++layer) {
    std::vector<at::Tensor> outputs;
    for (size_t direction = 0; direction < directions; ++direction) {
      const size_t cell = static_cast<size_t>(layer) * directions + direction;
      const auto of_cell = weights.slice(cell * stride, stride);
      const auto bias = [&](size_t which) {
        return has_biases ? of_cell[2 + which]
                          : at::zeros(of_cell[which].sizes(), of_cell[which].options());
      };
      const auto index = static_cast<int64_t>(cell);
      auto [output, hy, cy, workspace] = at::mkldnn_rnn_layer(
          layer_input, of_cell[0], of_cell[1], bias(0), bias(1), hidden.select(0, index),
          memory.select(0, index), direction > 0, {}, kLstm, hidden.size(2), layers, has_biases,
          bidirectional, batch_first, train);
      outputs.push_back(std::move(output));
      last_hidden.push_back(std::move(hy));
      last_memory.push_back(std::move(cy));
    }
    layer_input = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout != 0 && train && layer + 1 < layers) {
      layer_input = at::dropout(layer_input, dropout, true);
    }
  }
  return {batch_first ? layer_input.transpose(0, 1) : layer_input, at::stack(last_hidden, 0),
          at::stack(last_memory, 0)};
}

}  // namespace

void register_recurrent(torch::Library& kernels) {
  kernels.impl("lstm.input", &lstm);
  kernels.impl("lstm.data", &lstm_packed);
  kernels.impl("gru.input", &padded<kCudnnGru, &at::native::gru>);
  kernels.impl("gru.data", &packed<kCudnnGru, &at::native::gru>);
  kernels.impl("rnn_tanh.input", &padded<kCudnnTanh, &at::native::rnn_tanh>);
  kernels.impl("rnn_tanh.data", &packed<kCudnnTanh, &at::native::rnn_tanh>);
  kernels.impl("rnn_relu.input", &padded<kCudnnRelu, &at::native::rnn_relu>);
  kernels.impl("rnn_relu.data", &packed<kCudnnRelu, &at::native::rnn_relu>);
}

}  // namespace sing::client
