// Origin of an operator that is not torch's; only Python knows it.
#pragma once

#include <string>

#include "oplog/codec.h"

namespace sing::client {

// False if an operator belongs to torch or to this project: the worker has those anyway.
bool is_foreign(const std::string& name);

// Appends what a worker has to import for it. The caller holds no lock (Note [GIL] in session.h).
// Throws if no worker could have the operator.
void put_origin(Writer& out, const std::string& name);

}  // namespace sing::client
