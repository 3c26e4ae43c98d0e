// Operators of libraries other than torch exist when their library was imported.
//
// A notebook that uses such an operator says with its definition where it comes from, and the
// worker imports that: Python does it (kernelproxy/worker/op_imports.py). What was said goes into
// snapshots, since the next worker is another process. Libraries are imported into a process, not
// into a session: what is remembered here is the process's, as its dispatcher is.
#pragma once

#include <string>

#include "oplog/codec.h"

namespace sing {

// What to import. Any part may be empty.
struct Origin {
  std::string module;   // "torchvision"
  std::string root;     // the directory in which it is found, if not on the path anyway
  std::string library;  // path of a shared library whose loading registers the operator

  bool empty() const noexcept { return module.empty() && library.empty(); }
};

Origin get_origin(Reader& in);
void put_origin(Writer& out, const Origin& origin);

// Imports it if the operator does not exist yet. Never throws: a failure is told by complaint_of().
void import_origin(const std::string& name, const std::string& overload, Origin origin);
// Of an operator by its full name; empty if it was not said.
Origin origin_of(const std::string& full_name);
// Why the operator does not exist.
std::string complaint_of(const std::string& full_name);

}  // namespace sing
