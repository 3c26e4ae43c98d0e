#include "worker/exec/alone.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>

namespace sing {

namespace {

// Bounds on the elements of all operands and results together: one thread needs some ten
// microseconds for them. A second thread can at best halve that; three or more threads are
// worthwhile at smaller sizes already.
constexpr int64_t kElementsMax = 16384;
constexpr int64_t kElementsOfTwoMax = 65536;
constexpr int64_t kPointwiseElementsMax = 200'000;

// For products with this many rows, MKL splits the sums differently for one thread than for two.
constexpr int64_t kRowsSplitMin = 5, kRowsSplitMax = 11;
// The same holds, on processors with AVX-512, where a matrix of more than some 12,000 elements is
// multiplied by a single row or column.
constexpr int64_t kElementsOfVectorsMax = 8192;

// Functions that set the calling thread's number of threads for OpenMP and MKL. Torch's own
// function also changes settings of the whole process.
struct Runtime {
  void (*set_dynamic_of_mkl)(int) = find<void (*)(int)>("MKL_Set_Dynamic");
  void (*set_threads)(int) = find<void (*)(int)>("omp_set_num_threads");
  int (*set_threads_of_mkl)(int) = find<int (*)(int)>("MKL_Set_Num_Threads_Local");
  bool complete() const { return set_threads && set_threads_of_mkl; }

  template <class Function>
  static Function find(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }
};

const Runtime& runtime() {
  static const Runtime found;
  return found;
}

bool splits_sums(const Operand& operand) noexcept {
  const Dimensions& sizes = operand.geometry.sizes;
  return sizes.size() >= 2 && std::any_of(sizes.begin(), sizes.end(), [](int64_t size) {
           return size >= kRowsSplitMin && size <= kRowsSplitMax;
         });
}

bool is_vector(const Operand& operand) noexcept {
  const Dimensions& sizes = operand.geometry.sizes;
  const size_t count = sizes.size();
  return count >= 2 && (sizes[count - 1] == 1 || sizes[count - 2] == 1);
}

// Subtracts the tensor's elements from `left`. Returns false if it has more than are left.
bool take(const Geometry& geometry, int64_t& left) noexcept {
  int64_t count = 1;
  for (const int64_t size : geometry.sizes) {
    if (size > left) return false;  // prevents overflow, and zero sizes from hiding others
    count *= size;
    if (count > left) return false;
  }
  left -= count;
  return true;
}

}  // namespace

void use_threads(int count) {
  at::set_num_threads(count);
  let_mkl_choose();
}

void let_mkl_choose() noexcept {
  if (runtime().set_dynamic_of_mkl != nullptr) runtime().set_dynamic_of_mkl(1);
}

bool is_small(const Operator& op, const Call& call, const ExpectedReturns& expected) noexcept {
  if (op.sharing == Sharing::unknown) return false;
  int64_t left = kElementsMax;
  if (op.sharing == Sharing::elements) {
    left = kPointwiseElementsMax;
  } else if (at::get_num_threads() == 2) {
    left = kElementsOfTwoMax;
  }
  if (op.sharing == Sharing::sums &&
      std::any_of(call.operands.begin(), call.operands.end(), is_vector)) {
    left = std::min(left, kElementsOfVectorsMax);
  }
  for (const Operand& operand : call.operands) {
    if (!take(operand.geometry, left)) return false;
    if (op.sharing == Sharing::sums && splits_sums(operand)) return false;
  }
  for (const Expected& result : expected.items) {
    if (result.kind == Expected::Kind::tensor && !take(result.geometry, left)) return false;
  }
  return true;
}

Alone::Alone(bool really) noexcept {
  if (!really || !runtime().complete()) return;
  // Torch fixes a thread's number of threads at the first query: query it here, before the kernel
  // does.
  const int threads = at::get_num_threads();
  if (threads <= 1) return;
  threads_ = threads;
  runtime().set_threads(1);
  runtime().set_threads_of_mkl(1);
}

Alone::~Alone() {
  if (threads_ == 0) return;
  runtime().set_threads(threads_);
  runtime().set_threads_of_mkl(0);  // back to the process's setting
}

}  // namespace sing
