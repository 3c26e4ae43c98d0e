// Calls of operators on the device, executed by a worker in a thread of this process.
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/log/session.h"
#include "client/ops/operators.h"
#include "client/ops/plans.h"
#include "client/ops/tensors.h"
#include "tests/check.h"
#include "tests/client/device.h"

using namespace sing;
using namespace sing::test;

namespace {

uint64_t requests() { return client::Session::get().counters().requests; }

at::Tensor numbers(int64_t rows, int64_t columns) {
  return at::arange(rows * columns, at::TensorOptions().dtype(at::kFloat)).view({rows, columns});
}

}  // namespace

TEST(bytes_return_as_they_were_sent) {
  const at::Tensor host = numbers(30, 40);
  EXPECT(at::equal(to_host(to_device(host)), host));
  EXPECT(at::equal(to_host(to_device(host).t()), host.t()));
  EXPECT(at::equal(to_host(to_device(host).slice(1, 3, 20, 2)), host.slice(1, 3, 20, 2)));
}

TEST(results_equal_the_cpus) {
  const c10::NoGradGuard no_grad;
  const at::Tensor one = numbers(3, 4), other = numbers(4, 5);
  const at::Tensor here = to_device(one), there = to_device(other);
  EXPECT(at::equal(to_host(at::mm(here, there)), at::mm(one, other)));
  EXPECT(at::equal(to_host(at::relu(here - 5)), at::relu(one - 5)));
  EXPECT(at::equal(to_host(at::cat(std::vector<at::Tensor>{here, here})),
                   at::cat(std::vector<at::Tensor>{one, one})));
  EXPECT(at::equal(to_host(here.add_(here)), one + one));
}

TEST(an_operator_waits_for_the_worker_only_with_new_operands) {
  const c10::NoGradGuard no_grad;
  const at::Tensor self = to_device(numbers(5, 6));
  const auto sort = [&] { return std::get<0>(at::sort(self, 0)); };
  uint64_t before = requests();
  sort();
  EXPECT(requests() > before);
  before = requests();
  const at::Tensor sorted = sort();
  EXPECT_EQ(requests(), before);
  EXPECT(at::equal(to_host(sorted), numbers(5, 6)));
}

TEST(sizes_that_depend_on_data_are_requested_each_time) {
  const c10::NoGradGuard no_grad;
  const at::Tensor self = to_device(numbers(1, 6) - 3);
  for (int i = 0; i < 3; ++i) {
    const uint64_t before = requests();
    EXPECT_EQ(at::nonzero(self).size(0), 5);
    EXPECT_EQ(requests(), before + 1);
  }
}

TEST(wrong_shapes_raise_torchs_error_at_once) {
  const c10::NoGradGuard no_grad;
  const at::Tensor self = to_device(numbers(3, 4));
  EXPECT_THROWS(c10::Error, at::mm(self, self));
  EXPECT_THROWS(c10::Error, at::add(self, to_device(numbers(2, 2))));
  EXPECT(at::equal(to_host(self), numbers(3, 4)));
}

TEST(tensors_of_the_host_are_refused_as_on_a_gpu) {
  const c10::NoGradGuard no_grad;
  const at::Tensor self = to_device(numbers(2, 3));
  EXPECT_THROWS(c10::Error, at::add(self, numbers(2, 3)));
  EXPECT(at::equal(to_host(at::add(self, at::ones({}))), numbers(2, 3) + 1));
}

TEST(storages_are_charged_while_they_live) {
  client::Session& session = client::Session::get();
  const uint64_t before = session.client().memory_used.load();
  {
    const at::Tensor held = to_device(at::zeros({1000, 1000}));
    EXPECT(session.client().memory_used.load() >= before + 4'000'000);
  }
  EXPECT_EQ(session.client().memory_used.load(), before);
}

TEST(more_than_the_grant_is_refused) {
  client::Session& session = client::Session::get();
  session.limit_memory(session.client().memory_used.load() + (1 << 20));
  EXPECT_THROWS(c10::OutOfMemoryError, to_device(at::zeros({1 << 20})));
  session.limit_memory(UINT64_MAX);
  EXPECT_EQ(to_device(at::zeros({1 << 20})).numel(), 1 << 20);
}

TEST(threads_issue_operators_at_the_same_time) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&wrong, thread] {
      const c10::NoGradGuard no_grad;
      at::Tensor sum = to_device(at::zeros({16}));
      for (int i = 0; i < 200; ++i) {
        sum.add_(thread);
        if (i % 50 == 0) client::Session::get().synchronize();
      }
      wrong += !at::equal(to_host(sum), at::zeros({16}) + 200 * thread);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(each_operator_has_one_row_and_rows_name_operators) {
  device();
  std::set<std::string_view> names;
  std::set<std::string> known;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    known.insert(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  }
  for (const Row& row : client::table().rows()) {
    EXPECT(names.insert(row.name).second);
    if (row.way == Way::client && known.count(std::string(row.name)) != 0) {
      const size_t dot = row.name.find('.');
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
          std::string(row.name.substr(0, dot)).c_str(),
          dot == std::string_view::npos ? "" : std::string(row.name.substr(dot + 1)).c_str());
      if (!op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
        fail(__FILE__, __LINE__, "no kernel of the client for " + std::string(row.name));
      }
    }
  }
}

TEST(the_most_specific_row_wins) {
  const Row norm = client::row_of("aten::_foreach_norm.Scalar");
  EXPECT(norm.way == Way::whole && norm.shape != nullptr && norm.trusted != nullptr);
  EXPECT(client::row_of("aten::_fused_rms_norm").way == Way::composite);
  EXPECT(client::row_of("aten::_fused_adam_").way == Way::whole);
  const Row mm = client::row_of("aten::mm");
  EXPECT(mm.sharing == Sharing::sums && mm.coo == Way::whole && mm.substitute == nullptr);
  EXPECT(client::row_of("aten::mm.dtype").sharing == Sharing::sums);
  EXPECT(client::row_of("aten::mmm").sharing == Sharing::unknown);
}
