// Sparse operands and results: their parts, and the handling of invalid records.
#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

using Floats = std::vector<float>;

const Compound kCoo{at::kSparse, true, 2, {2, 3}};
const Compound kCsr{at::kSparseCsr, false, 0, {2, 3}};

std::array<uint32_t, 3> numbers(Host& host) {
  return {host.next_id(), host.next_id(), host.next_id()};
}

struct Part {
  Tag tag;
  uint32_t id;
  Geometry geometry;
};

Part read_part(Reader& in) {
  Part part{in.get<Tag>(), in.get<uint32_t>(), {}};
  if (part.tag == Tag::tensor) in.get<uint64_t>();
  part.geometry = get_geometry(in);
  return part;
}

Floats floats(Host& host, const Part& part) {
  return host.values({part.id, {part.geometry.sizes.begin(), part.geometry.sizes.end()}});
}

// [[0, 0, 1], [2, 0, 0]]
struct Matrix {
  explicit Matrix(Host& host)
      : indices(host.upload_indices({0, 1, 2, 0}, {2, 2})),
        values(host.upload({1, 2}, {2})),
        rows(host.upload_indices({0, 1, 2}, {3})),
        columns(host.upload_indices({2, 0}, {2})) {}
  const Tensor indices, values, rows, columns;
};

// Returns the error of a call with such an operand.
std::string complaint(Host& host, const Compound& compound, const std::vector<Tensor>& parts) {
  const auto clone = host.define("aten::clone");
  const auto answer = host.request_call(
      CallRecord(clone, 2, 1).sparse(compound, parts).none().returns_numbers(numbers(host)));
  return answer.ok() ? "" : answer.message();
}

}  // namespace

TEST(the_parts_of_a_sparse_result_get_numbers) {
  Host host;
  host.start();
  const Matrix matrix(host);
  const auto add = host.define("aten::add", "Tensor");
  const auto ids = numbers(host);
  const auto answer = host.request_call(CallRecord(add, 3, 1)
                                            .sparse(kCoo, {matrix.indices, matrix.values})
                                            .sparse(kCoo, {matrix.indices, matrix.values})
                                            .integer(1)
                                            .returns_numbers(ids));
  EXPECT(answer.ok());
  Reader in(answer.bytes);
  EXPECT_EQ(in.get<Tag>(), Tag::compound);
  const Compound sum = get_compound(in);
  EXPECT(sum.layout == at::kSparse && sum.sizes == kCoo.sizes);
  const Part indices = read_part(in), values = read_part(in);
  EXPECT_EQ(indices.id, ids[0]);
  EXPECT_EQ(values.id, ids[1]);
  EXPECT_EQ(in.get<uint32_t>(), 0u);
  EXPECT(in.ok());
  EXPECT(floats(host, values) == (Floats{2, 4}));
}

TEST(a_product_of_a_sparse_and_a_dense_tensor_is_dense) {
  Host host;
  host.start();
  const Matrix matrix(host);
  const auto mm = host.define("aten::mm");
  const Tensor dense = host.upload({1, 2, 3, 4, 5, 6}, {3, 2});
  const Tensor predicted{host.next_id(), {2, 2}};
  host.call(CallRecord(mm, 2, 1)
                .sparse(kCsr, {matrix.rows, matrix.columns, matrix.values})
                .tensor(dense)
                .returns(predicted));
  EXPECT(host.values(predicted) == (Floats{5, 6, 2, 4}));
  const auto ids = numbers(host);
  const auto answer = host.request_call(CallRecord(mm, 2, 1)
                                            .sparse(kCoo, {matrix.indices, matrix.values})
                                            .tensor(dense)
                                            .returns_numbers(ids));
  EXPECT(answer.ok());
  Reader in(answer.bytes);
  const Part product = read_part(in);
  EXPECT_EQ(product.tag, Tag::tensor);
  EXPECT(floats(host, product) == (Floats{5, 6, 2, 4}));
}

TEST(a_sparse_operand_that_is_changed_is_told_of_its_parts) {
  Host host;
  host.start();
  const Matrix matrix(host);
  const auto add = host.define("aten::add_", "Tensor");
  const auto answer = host.request_call(CallRecord(add, 3, 1)
                                            .sparse(kCoo, {matrix.indices, matrix.values})
                                            .sparse(kCoo, {matrix.indices, matrix.values})
                                            .integer(2)
                                            .returns_numbers(numbers(host)));
  EXPECT(answer.ok());
  Reader in(answer.bytes);
  EXPECT_EQ(in.get<Tag>(), Tag::compound);
  get_compound(in);
  read_part(in);
  EXPECT(floats(host, read_part(in)) == (Floats{3, 6}));
  EXPECT(in.ok());
}

TEST(indices_that_lead_elsewhere_are_refused) {
  Host host;
  host.start();
  const Matrix matrix(host);
  EXPECT_EQ(complaint(host, kCoo, {matrix.indices, matrix.values}), "");
  EXPECT_EQ(complaint(host, kCsr, {matrix.rows, matrix.columns, matrix.values}), "");
  const Tensor far = host.upload_indices({0, 0, 0, 3}, {2, 2});
  const Tensor negative = host.upload_indices({0, -1, 0, 0}, {2, 2});
  const Tensor few = host.upload({1}, {1});
  EXPECT(!complaint(host, kCoo, {far, matrix.values}).empty());
  EXPECT(!complaint(host, kCoo, {negative, matrix.values}).empty());
  EXPECT(!complaint(host, kCoo, {matrix.indices, few}).empty());
  EXPECT(!complaint(host, kCoo, {matrix.values, matrix.values}).empty());
  EXPECT(!complaint(host, kCsr, {matrix.rows, matrix.columns, few}).empty());
  const std::vector<std::vector<int64_t>> rows = {{0, 1, 9}, {1, 1, 2}, {0, 3, 2}, {0, -1, 2}};
  for (const auto& wrong : rows) {
    const Tensor bad = host.upload_indices(wrong, {3});
    EXPECT(!complaint(host, kCsr, {bad, matrix.columns, matrix.values}).empty());
  }
  const Tensor columns = host.upload_indices({3, 0}, {2});
  EXPECT(!complaint(host, kCsr, {matrix.rows, columns, matrix.values}).empty());
  const Compound blocks{at::kSparseBsr, false, 0, {2, 3}};
  EXPECT(!complaint(host, blocks, {matrix.rows, matrix.columns, matrix.values}).empty());
  const Compound huge{at::kSparse, false, 2, {int64_t{1} << 40, int64_t{1} << 40}};
  EXPECT(!complaint(host, huge, {matrix.indices, matrix.values}).empty());
}

TEST(sparse_tensors_as_no_client_describes_them_end_the_session) {
  const auto end = [](const Compound& compound, bool whole) {
    Host host;
    host.start();
    const Matrix matrix(host);
    const auto clone = host.define("aten::clone");
    CallRecord call(clone, 2, 1);
    call.sparse(compound, {matrix.indices});
    if (whole) call.tensor(matrix.values);
    host.call(call.none().returns({host.next_id(), {2, 3}}));
    return host.corruption();
  };
  EXPECT(end({at::kMkldnn, false, 0, {2, 3}}, true).find("operands") != std::string::npos);
  EXPECT(end({at::kSparse, false, 3, {2, 3}}, true).find("operands") != std::string::npos);
  EXPECT(end({at::kSparse, false, 2, {-2, 3}}, true).find("operands") != std::string::npos);
  EXPECT(end({at::kSparseCsr, true, 0, {2, 3}}, true).find("operands") != std::string::npos);
  EXPECT(end(kCoo, false).find("part") != std::string::npos);
}
