// Write sets: what a call may change, which a snapshot saves first and saves again.
#include <torch/library.h>

#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

using Floats = std::vector<float>;

// Claims to change nothing.
at::Tensor liar(const at::Tensor& x, const at::Tensor& y) {
  y.data_ptr<float>()[0] += 1;
  return x.clone();
}

uint32_t changed_arguments(const char* name, const char* overload) {
  Operators operators(true, nullptr);
  operators.define(1, name, overload);
  uint32_t changed = 0;
  const auto& arguments = operators.at(1).arguments;
  for (size_t i = 0; i < arguments.size(); ++i) changed |= uint32_t{arguments[i].changed} << i;
  return changed;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(aten, library) {
  library.def("sing_test_liar(Tensor x, Tensor y) -> Tensor", liar);
}
TORCH_LIBRARY(sing_test, library) { library.def("liar(Tensor x, Tensor y) -> Tensor", liar); }

TEST(write_sets_are_those_of_the_schema_and_the_known_exceptions) {
  EXPECT_EQ(changed_arguments("aten::add", "Tensor"), 0u);
  EXPECT_EQ(changed_arguments("aten::add_", "Tensor"), 1u);
  EXPECT_EQ(changed_arguments("aten::add", "out"), 8u);
  EXPECT_EQ(changed_arguments("aten::_foreach_add_", "List"), 1u);
  EXPECT_EQ(changed_arguments("aten::native_batch_norm", ""), 8u + 16u);
  EXPECT_EQ(changed_arguments("aten::cudnn_batch_norm", ""), 8u + 16u);
  EXPECT_EQ(changed_arguments("aten::batch_norm_update_stats", ""), 2u + 4u);
  EXPECT_EQ(changed_arguments("aten::batch_norm_gather_stats_with_counts", ""), 8u + 16u);
  EXPECT_EQ(changed_arguments("sing_test::liar", ""), 3u);
  for (const char* name :
       {"aten::_cudnn_rnn", "aten::_cudnn_rnn_backward", "aten::mkldnn_rnn_layer_backward"}) {
    EXPECT(changed_arguments(name, "") != 0);
  }
}

TEST(a_change_that_the_write_set_does_not_name_is_an_error_when_looked_for) {
  Host host;
  host.options.limits.check_writes = true;
  host.start();
  const auto lies = host.define("aten::sing_test_liar");
  const auto honest = host.define("sing_test::liar");
  const auto x = host.upload({1, 2}, {2});
  const auto y = host.upload({3}, {1});
  const Tensor result{host.next_id(), {2}};
  host.call(CallRecord(honest, 2, 1).tensor(x).tensor(y).returns(result));
  EXPECT(host.synchronize().ok());
  // If one storage is both, it may change.
  host.call(CallRecord(host.define("aten::add_", "Tensor"), 3, 1)
                .tensor(x)
                .tensor(x)
                .integer(1)
                .returns_nothing());
  EXPECT(host.synchronize().ok());
  host.call(CallRecord(lies, 2, 1).tensor(x).tensor(y).returns(result));
  const auto answer = host.synchronize();
  EXPECT(!answer.ok());
  EXPECT_EQ(answer.operation(), std::string("aten::sing_test_liar"));
  EXPECT(answer.message().find("its argument 'y'") != std::string::npos);
}

TEST(only_what_has_changed_is_copied_again) {
  Host host;
  host.start();
  const auto add = host.define("aten::add_", "Scalar");
  std::vector<Tensor> tensors;
  for (int i = 0; i < 4; ++i) tensors.push_back(host.upload(Floats(5000, 1), {5000}));
  const auto small = host.upload({1}, {1});
  host.wait_consumed();
  const auto take = [&](bool stop) {
    host.wait_consumed();
    const Taken taken = host.session().snapshot(stop ? Manner::stop : Manner::beside);
    host.commit(taken.position);
    close(taken.fd);
    return taken.copied;
  };
  EXPECT_EQ(take(true), uint64_t{80'000});
  EXPECT_EQ(host.worker().dirty_bytes.load(), uint64_t{0});
  EXPECT_EQ(take(false), uint64_t{0});
  const auto increase = [&](const Tensor& tensor) {
    host.call(CallRecord(add, 3, 1).tensor(tensor).integer(1).integer(1).returns_nothing());
    host.wait_consumed();
  };
  increase(tensors[2]);
  increase(small);
  host.wait_consumed();
  EXPECT_EQ(host.worker().dirty_bytes.load(), uint64_t{20'004});
  EXPECT_EQ(take(false), uint64_t{20'000});
  host.free(tensors[0].id);
  EXPECT_EQ(take(false), uint64_t{0});
  EXPECT_EQ(host.worker().dirty_bytes.load(), uint64_t{0});
}
