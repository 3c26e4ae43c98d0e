// Origins of operators: operators of libraries other than torch exist once their library was
// imported.
//
// A client that uses such an operator sends its origin with its definition, and the worker imports
// that: Python does it (kernelproxy/worker/op_imports.py). Origins are part of snapshots, since the
// next worker is another process. Libraries are imported into a process, not into a session: what
// is stored here belongs to the process, as its dispatcher does.
#pragma once

#include <string>

#include "oplog/codec.h"

namespace sing {

// What to import. Any part may be empty.
struct Origin {
  std::string module;   // "torchvision"
  std::string root;     // the directory in which it is found, if not on the path
  std::string library;  // path of a shared library whose loading registers the operator

  bool empty() const noexcept { return module.empty() && library.empty(); }
};

Origin get_origin(Reader& in);
void put_origin(Writer& out, const Origin& origin);

// Imports it if the operator does not exist yet. Never throws: complaint_of() returns the failure.
void import_origin(const std::string& name, const std::string& overload, Origin origin);
// Origin of an operator by its full name; empty if none was sent.
Origin origin_of(const std::string& full_name);
// Reason why the operator does not exist.
std::string complaint_of(const std::string& full_name);

}  // namespace sing
