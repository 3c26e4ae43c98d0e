// Torch's settings on which an operator's result may depend: one byte each, packed.
//
// They come from the notebook's torch; a worker's torch receives them by a record, and by
// snapshots. Settings that are not listed here have no effect on a device in torch, either
// (set_flush_denormal: a flag of one host thread), or only tune what no program can observe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/Exception.h>

#include "oplog/codec.h"

namespace sing {

struct Setting {
  uint8_t most;  // greater values are invalid
  uint8_t (*get)(at::Context& torch);
  void (*set)(at::Context& torch, uint8_t value);
};

namespace settings {

template <auto Get, auto Set>
constexpr Setting flag() {
  return {1, [](at::Context& torch) { return static_cast<uint8_t>((torch.*Get)()); },
          [](at::Context& torch, uint8_t value) { (torch.*Set)(value != 0); }};
}

template <at::Float32Backend Backend, at::Float32Op Op>
constexpr Setting float32_precision() {
  return {
      static_cast<uint8_t>(at::Float32Precision::BF16),
      [](at::Context& torch) { return static_cast<uint8_t>(torch.float32Precision(Backend, Op)); },
      [](at::Context& torch, uint8_t value) {
        torch.setFloat32Precision(Backend, Op, static_cast<at::Float32Precision>(value));
      }};
}

template <auto Get, auto Set>
constexpr Setting reduction() {
  using Option = at::CuBLASReductionOption;
  return {static_cast<uint8_t>(Option::DisallowReducedPrecisionDisallowSplitK),
          [](at::Context& torch) { return static_cast<uint8_t>((torch.*Get)()); },
          [](at::Context& torch, uint8_t value) {
            const auto option = static_cast<Option>(value);
            (torch.*Set)(option == Option::AllowReducedPrecisionWithSplitK,
                         option != Option::DisallowReducedPrecisionDisallowSplitK);
          }};
}

template <size_t Place>
constexpr Setting attention_order() {
  return {static_cast<uint8_t>(at::num_sdp_backends - 1),
          [](at::Context& torch) { return static_cast<uint8_t>(torch.sDPPriorityOrder()[Place]); },
          [](at::Context& torch, uint8_t value) {
            std::vector<int64_t> order;
            for (const auto backend : torch.sDPPriorityOrder()) {
              order.push_back(static_cast<int64_t>(backend));
            }
            order[Place] = value;
            torch.setSDPPriorityOrder(order);
          }};
}

inline uint8_t default_dtype(at::Context&) {
  return static_cast<uint8_t>(c10::get_default_dtype_as_scalartype());
}

inline void set_default_dtype(at::Context&, uint8_t value) {
  const auto dtype = static_cast<at::ScalarType>(value);
  TORCH_CHECK(at::isFloatingType(dtype), "the default dtype is not a floating one");
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
}

inline uint8_t determinism(at::Context& torch) {
  return static_cast<uint8_t>((torch.deterministicAlgorithms() ? 1 : 0) |
                              (torch.deterministicAlgorithmsWarnOnly() ? 2 : 0));
}

inline void set_determinism(at::Context& torch, uint8_t value) {
  torch.setDeterministicAlgorithms((value & 1) != 0, (value & 2) != 0);
}

inline uint8_t matmul_precision(at::Context& torch) {
  return static_cast<uint8_t>(torch.float32MatmulPrecision());
}

inline void set_matmul_precision(at::Context& torch, uint8_t value) {
  static constexpr const char* names[] = {"highest", "high", "medium"};
  torch.setFloat32MatmulPrecision(names[value]);
}

inline uint8_t convolution_tf32(at::Context& torch) {
  return static_cast<uint8_t>(torch.allowTF32CuDNN());
}

}  // namespace settings

// The old settings for float32's precision change the new ones, so the new ones come after them.
inline constexpr auto kSettings = [] {
  using namespace settings;
  using at::Context;
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  return std::to_array<Setting>({
      {static_cast<uint8_t>(at::ScalarType::NumOptions), &default_dtype, &set_default_dtype},
      {3, &determinism, &set_determinism},
      flag<&Context::deterministicFillUninitializedMemory,
           &Context::setDeterministicFillUninitializedMemory>(),
      {2, &matmul_precision, &set_matmul_precision},
      {1, &convolution_tf32,
       [](Context& torch, uint8_t value) { torch.setAllowTF32CuDNN(value != 0); }},
      float32_precision<Backend::CUDA, Op::CONV>(),
      float32_precision<Backend::CUDA, Op::RNN>(),
      float32_precision<Backend::CUDA, Op::MATMUL>(),
      float32_precision<Backend::MKLDNN, Op::CONV>(),
      float32_precision<Backend::MKLDNN, Op::RNN>(),
      float32_precision<Backend::MKLDNN, Op::MATMUL>(),
      reduction<&Context::allowFP16ReductionCuBLAS, &Context::setAllowFP16ReductionCuBLAS>(),
      reduction<&Context::allowBF16ReductionCuBLAS, &Context::setAllowBF16ReductionCuBLAS>(),
      flag<&Context::allowFP16AccumulationCuBLAS, &Context::setAllowFP16AccumulationCuBLAS>(),
      flag<&Context::allowFP16ReductionCPU, &Context::setAllowFP16ReductionCPU>(),
      flag<&Context::userEnabledCuDNN, &Context::setUserEnabledCuDNN>(),
      flag<&Context::benchmarkCuDNN, &Context::setBenchmarkCuDNN>(),
      flag<&Context::deterministicCuDNN, &Context::setDeterministicCuDNN>(),
      flag<&Context::userEnabledMkldnn, &Context::setUserEnabledMkldnn>(),
      flag<&Context::deterministicMkldnn, &Context::setDeterministicMkldnn>(),
      flag<&Context::userEnabledNNPACK, &Context::setUserEnabledNNPACK>(),
      flag<&Context::userEnabledMathSDP, &Context::setSDPUseMath>(),
      flag<&Context::userEnabledFlashSDP, &Context::setSDPUseFlash>(),
      flag<&Context::userEnabledMemEfficientSDP, &Context::setSDPUseMemEfficient>(),
      flag<&Context::userEnabledCuDNNSDP, &Context::setSDPUseCuDNN>(),
      flag<&Context::userEnabledOverrideableSDP, &Context::setSDPUseOverrideable>(),
      flag<&Context::allowFP16BF16ReductionMathSDP, &Context::setAllowFP16BF16ReductionMathSDP>(),
      attention_order<0>(),
      attention_order<1>(),
      attention_order<2>(),
      attention_order<3>(),
      attention_order<4>(),
      {static_cast<uint8_t>(at::LinalgBackend::Magma),
       [](Context& torch) { return static_cast<uint8_t>(torch.linalgPreferredBackend()); },
       [](Context& torch, uint8_t value) {
         torch.setLinalgPreferredBackend(static_cast<at::LinalgBackend>(value));
       }},
      {static_cast<uint8_t>(at::BlasBackend::Ck),
       [](Context& torch) { return static_cast<uint8_t>(torch.blasPreferredBackend()); },
       [](Context& torch, uint8_t value) {
         torch.setBlasPreferredBackend(static_cast<at::BlasBackend>(value));
       }},
  });
}();

using Settings = std::array<uint8_t, kSettings.size()>;

inline void put_settings(Writer& out, const Settings& values) {
  out.put<uint32_t>(static_cast<uint32_t>(values.size()));
  out.put_bytes(values.data(), values.size());
}

// Rejects values that torch cannot have: reader.ok() is then false.
inline Settings get_settings(Reader& in) {
  Settings values{};
  const auto bytes = in.get_bytes(in.get<uint32_t>());
  if (bytes.size() != values.size()) in.fail();
  for (size_t i = 0; in.ok() && i < values.size(); ++i) {
    values[i] = static_cast<uint8_t>(bytes[i]);
    if (values[i] > kSettings[i].most) in.fail();
  }
  if (!at::isFloatingType(static_cast<at::ScalarType>(values[0]))) in.fail();
  return values;
}

// Reads this process's settings into `values`. A setting that torch cannot report stays unchanged:
// the old ones for float32's precision, while the new ones have a value that they cannot express.
inline void read_settings(Settings& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    try {
      const uint8_t value = kSettings[i].get(at::globalContext());
      if (value <= kSettings[i].most) values[i] = value;
    } catch (const c10::Error&) {
    }
  }
}

// Applies them to this process's torch. A setting that this build of torch refuses (a library that
// it lacks as the preferred one) has no effect on its operators.
inline void apply_settings(const Settings& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    bool same = false;  // some setters warn
    try {
      same = kSettings[i].get(at::globalContext()) == values[i];
    } catch (const c10::Error&) {
    }
    try {
      if (!same) kSettings[i].set(at::globalContext(), values[i]);
    } catch (const c10::Error&) {
    }
  }
}

}  // namespace sing
