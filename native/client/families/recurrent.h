// Recurrent networks: chooses the kernel in the client.
#pragma once

#include <torch/library.h>

namespace sing::client {

// Registers kernels of aten::lstm, aten::gru, aten::rnn_tanh and aten::rnn_relu, for padded input
// and for packed sequences (`data` and `batch_sizes`). A GPU uses cuDNN's network, in one operator.
// A software device uses oneDNN's layers for a padded LSTM, like torch on a CPU, so that results
// agree bit for bit; everything else is torch's composite over fused cells.
void register_recurrent(torch::Library& kernels);

}  // namespace sing::client
