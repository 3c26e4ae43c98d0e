// The geometry cache, the keys of operators' operands, and the addresses of storages.
#include "client/ops/plans.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/log/addresses.h"
#include "client/ops/encode.h"
#include "client/ops/operators.h"
#include "tests/check.h"
#include "tests/client/device.h"

using namespace sing;
using namespace sing::test;
using client::Plan;
using client::PlanCache;

namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::shared_ptr<Plan> plan_of(int64_t size) {
  auto plan = std::make_shared<Plan>();
  plan->outputs.push_back(client::contiguous_output(at::kFloat, {size}));
  return plan;
}

int64_t size_in(const Plan* plan) { return plan->outputs[0].geometry.sizes[0]; }

// The key of add.Tensor with these operands.
std::vector<std::byte> key_of(const at::Tensor& self, const at::Tensor& other,
                              const at::Scalar& alpha) {
  client::Operator& op =
      client::find_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::add", "Tensor"));
  client::Encoder encoder;
  encoder.call(op, std::vector<c10::IValue>{self, other, alpha});
  return {encoder.key().begin(), encoder.key().end()};
}

at::Tensor ones(std::vector<int64_t> sizes, at::ScalarType type = at::kFloat) {
  return twin(at::ones(sizes, at::TensorOptions().dtype(type)));
}

}  // namespace

TEST(a_plan_is_found_by_its_key_and_by_no_other) {
  PlanCache& cache = PlanCache::get();
  const std::string key = "a key of some operator", other = key + ".";
  EXPECT(cache.find(bytes_of(key), true) == nullptr);
  cache.insert(bytes_of(key), plan_of(3));
  EXPECT_EQ(size_in(cache.find(bytes_of(key), true)), 3);
  EXPECT(cache.find(bytes_of(other), true) == nullptr);
  EXPECT(cache.find(bytes_of(key.substr(0, 8)), true) == nullptr);
}

TEST(a_plan_of_the_same_key_replaces_the_one_before_for_threads_that_have_not_seen_it) {
  PlanCache& cache = PlanCache::get();
  const std::string key = "replaced";
  cache.insert(bytes_of(key), plan_of(1));
  cache.insert(bytes_of(key), plan_of(2));
  int64_t seen = 0;
  std::thread([&] { seen = size_in(cache.find(bytes_of(key), true)); }).join();
  EXPECT_EQ(seen, 2);
}

TEST(a_plan_that_was_found_once_is_found_nearby) {
  PlanCache& cache = PlanCache::get();
  const std::string key = "nearby";
  cache.insert(bytes_of(key), plan_of(5));
  EXPECT(cache.find_nearby(bytes_of(key)) == nullptr);
  cache.find(bytes_of(key), true);
  const uint64_t hits = cache.hits();
  EXPECT_EQ(size_in(cache.find_nearby(bytes_of(key))), 5);
  EXPECT_EQ(cache.hits(), hits + 1);
}

TEST(a_plan_in_use_stays_valid_while_nested_calls_find_others) {
  PlanCache& cache = PlanCache::get();
  cache.insert(bytes_of("outer"), plan_of(7));
  const Plan* outer = cache.find(bytes_of("outer"), true);
  for (int i = 0; i < 5000; ++i) {
    const std::string key = "inner " + std::to_string(i);
    cache.insert(bytes_of(key), plan_of(i));
    EXPECT_EQ(size_in(cache.find(bytes_of(key), false)), i);
  }
  EXPECT_EQ(size_in(outer), 7);
}

TEST(threads_find_and_insert_plans_at_the_same_time) {
  PlanCache& cache = PlanCache::get();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const std::string key = "shared " + std::to_string(i % 50);
        cache.insert(bytes_of(key), plan_of(i % 50));
        const Plan* plan = cache.find(bytes_of(key), true);
        wrong += plan == nullptr || size_in(plan) != i % 50;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(keys_have_everything_on_which_geometry_depends_and_nothing_else) {
  const at::Tensor one = ones({3, 4}), same = ones({3, 4});
  const auto key = key_of(one, one, 1);
  EXPECT(key_of(same, one, 2) == key_of(same, one, 3));  // numbers do not decide it
  EXPECT(key_of(same, same, 1) == key);                  // nor does the storage
  EXPECT(key_of(ones({4, 3}), one, 1) != key);
  EXPECT(key_of(ones({3, 4}, at::kHalf), one, 1) != key);
  EXPECT(key_of(one, one, 1.5) != key);  // their types do
  EXPECT(key_of(twin(at::ones({4, 3}).t()), one, 1) != key);
  EXPECT(key_of(twin(at::ones({1, 4}).expand({3, 4})), one, 1) != key);
}

TEST(addresses_of_live_storages_do_not_overlap) {
  client::Addresses addresses;
  struct Range {
    std::byte* begin;
    uint64_t bytes;
    uint32_t size_class;
  };
  std::vector<Range> ranges;
  std::set<std::byte*> begins;
  for (uint64_t bytes = 1; bytes < 100'000'000; bytes = bytes * 3 / 2 + 1) {
    Range range{nullptr, bytes, 0};
    range.begin = addresses.take(bytes, range.size_class);
    EXPECT(range.begin != nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(range.begin) % client::kChargeBytes, 0u);
    for (const Range& other : ranges) {
      EXPECT(range.begin + range.bytes <= other.begin || other.begin + other.bytes <= range.begin);
    }
    ranges.push_back(range);
  }
  // A freed address serves the next storage of the size.
  addresses.give(ranges[5].begin, ranges[5].size_class);
  uint32_t size_class = 0;
  EXPECT(addresses.take(ranges[5].bytes, size_class) == ranges[5].begin);
  EXPECT(addresses.take(0, size_class) == nullptr);
}
