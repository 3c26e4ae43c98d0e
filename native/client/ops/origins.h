// Where an operator that is not torch's comes from, which only Python can tell.
#pragma once

#include <string>

#include "oplog/codec.h"

namespace sing::client {

// Whether an operator belongs to torch, or is ours: the worker has it anyway.
bool is_foreign(const std::string& name);

// Appends what a worker has to import for it. The caller holds no lock (Note [GIL] in session.h).
// Throws if no worker could have the operator.
void put_origin(Writer& out, const std::string& name);

}  // namespace sing::client
