// Conditions under which an operator in place cannot fail (the column `trusted` of ops/table.h).
//
// For operators that draw random numbers: true if the operator accepts these parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

namespace sing::client {

using Operands = c10::ArrayRef<c10::IValue>;

inline bool always(Operands) { return true; }

inline bool is_real(const c10::IValue& self) {
  return at::isFloatingType(self.toTensor().scalar_type());
}

inline bool number_of_one(Operands operands) { return operands[1].toTensor().dim() == 0; }

inline bool ordered(Operands operands) {
  return operands[2].isInt() && operands[1].toInt() < operands[2].toInt();
}
inline bool above_zero(Operands operands) { return operands[1].toInt() > 0; }
inline bool between(Operands operands) {
  return is_real(operands[0]) && operands[1].toDouble() <= operands[2].toDouble();
}
inline bool positive_second(Operands operands) {
  return is_real(operands[0]) && operands[2].toDouble() > 0;
}
inline bool positive(Operands operands) {
  return is_real(operands[0]) && operands[1].toDouble() > 0;
}
inline bool probable(Operands operands) {
  return operands[1].toDouble() >= 0 && operands[1].toDouble() <= 1;
}
inline bool strictly_probable(Operands operands) {
  return operands[1].toDouble() > 0 && operands[1].toDouble() < 1;
}

}  // namespace sing::client
