// What torch's elementwise kernels compute for each element, by the names of their functors.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/values.h"

namespace sing_double {

struct Functor {
  Type out = Type::none;
  std::vector<Type> in;
  size_t bytes = 1;  // of the functor itself
  // Returns the function of the elements; the functor's own parameters are read from its bytes.
  std::function<std::function<Value(const Value*)>(const char* functor)> bind;
};

// The functor of a readable name; one without `bind` if the double does not know it.
Functor functor_named(const std::string& name);

}  // namespace sing_double
