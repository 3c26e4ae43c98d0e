#include "worker/exec/checking.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace sing {

namespace {

std::vector<std::byte> bytes_of(const Slot& slot) {
  std::vector<std::byte> bytes(slot.storage.nbytes());
  Storages::read(slot, 0, bytes);
  return bytes;
}

}  // namespace

WriteCheck::WriteCheck(const State& state, const Call& call) {
  for (const Operand& operand : call.operands) {
    // One storage may belong to several operands.
    const bool changes =
        std::any_of(call.operands.begin(), call.operands.end(),
                    [&](const Operand& other) { return other.id == operand.id && other.changed; });
    if (!changes) before_.push_back({&operand, bytes_of(state.storages.slots()[operand.id])});
  }
}

void WriteCheck::compare(const State& state, const Operator& op) const {
  for (const Before& before : before_) {
    const Operand& operand = *before.operand;
    TORCH_CHECK(before.bytes == bytes_of(state.storages.slots()[operand.id]),
                "internal: ", op.full_name, " has changed its argument '",
                op.handle->schema().arguments()[operand.argument].name(),
                "', which is not in its write set");
  }
}

}  // namespace sing
