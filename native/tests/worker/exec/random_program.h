// Random programs, and an agent that disturbs their workers at random.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/harness.h"

namespace sing::test {

using Random = std::mt19937_64;

// Appends the records of a program, which depend only on the seed.
class Program {
 public:
  // `faulty`: some of its kernels fault on a GPU, each time.
  Program(Host& host, uint64_t seed, bool faulty = false)
      : host_(host), random_(seed), faulty_(faulty) {
    normal_ = host.define("aten::normal_");
    add_scalar_ = host.define("aten::add_", "Scalar");
    add_ = host.define("aten::add_", "Tensor");
    add_out_ = host.define("aten::add", "out");
    mul_ = host.define("aten::mul", "Tensor");
    fill_ = host.define("aten::fill_", "Scalar");
    foreach_ = host.define("aten::_foreach_add_", "Scalar");
    norm_ = host.define("aten::native_batch_norm");
    nonzero_ = host.define("aten::nonzero");
    nonzero_out_ = host.define("aten::nonzero", "out");
    mm_ = host.define("aten::mm");
    gather_ = host.define("aten::gather");
    scatter_ = host.define("aten::scatter_", "value");
    // Not the default generator, which belongs to the process: here, one process has several
    // workers.
    host.generator(1, GeneratorAction::seed, seed);
    for (Tensor& statistics : statistics_) {
      statistics = host.allocate({kChannels});
      fill(statistics, 1);
    }
    for (int i = 0; i < 4; ++i) allocate();
  }

  void step() {
    static constexpr void (Program::* kSteps[])() = {&Program::draw,
                                                     &Program::draw,
                                                     &Program::shift_view,
                                                     &Program::shift_view,
                                                     &Program::accumulate,
                                                     &Program::out,
                                                     &Program::out_part,
                                                     &Program::out_part,
                                                     &Program::product,
                                                     &Program::product,
                                                     &Program::overwrite,
                                                     &Program::each,
                                                     &Program::normalise,
                                                     &Program::free_one,
                                                     &Program::again,
                                                     &Program::resize,
                                                     &Program::upload,
                                                     &Program::allocate,
                                                     &Program::indices,
                                                     &Program::indices_out,
                                                     &Program::wrong,
                                                     &Program::part,
                                                     &Program::upload_in_pieces,
                                                     &Program::upload_in_pieces};
    if (faulty_ && below(40) == 0) {
      fault();
    } else {
      (this->*kSteps[below(std::size(kSteps))])();
    }
    while (tensors_.size() < 3) allocate();
    while (tensors_.size() > 14) free_one();
  }

  // The records whose kernels fault.
  const std::vector<uint64_t>& faults() const { return faults_; }

  // Returns all bytes of the program on the device, and what failed.
  std::vector<Bytes> result() {
    std::vector<Bytes> result;
    result.push_back(host_.synchronize().bytes);
    for (const auto& statistics : statistics_) result.push_back(host_.read(statistics).bytes);
    for (const auto& tensor : tensors_) result.push_back(host_.read(tensor).bytes);
    for (const auto& tensor : pinned_) result.push_back(host_.read(tensor).bytes);
    for (const auto& [id, bytes] : found_) {
      result.push_back(host_.request(RecordKind::read, read_payload(id, 0, bytes)).bytes);
    }
    result.push_back(host_.generator_state(1));
    return result;
  }

 private:
  static constexpr int64_t kChannels = 1500;

  uint64_t below(uint64_t end) { return random_() % end; }
  Tensor& any() { return tensors_[below(tensors_.size())]; }
  // From a few bytes up to many pieces.
  int64_t size() { return static_cast<int64_t>(1 + below(below(3) == 0 ? 40'000 : 3'000)); }

  Geometry view(const Tensor& tensor) {
    Geometry geometry = contiguous(tensor);
    const int64_t count = tensor.sizes[0];
    geometry.offset = static_cast<int64_t>(below(static_cast<uint64_t>(count)));
    const int64_t step = 1 + static_cast<int64_t>(below(3));
    geometry.strides = {step};
    geometry.sizes = {(count - geometry.offset + step - 1) / step};
    return geometry;
  }
  void fill(const Tensor& tensor, double value) {
    host_.call(CallRecord(fill_, 2, 1).tensor(tensor).real(value).returns_nothing());
  }

  void allocate() { tensors_.push_back(host_.allocate({size()})); }
  void draw() {
    const Tensor& tensor = any();
    const bool whole = below(2) == 0;
    const Geometry geometry = whole ? contiguous(tensor) : view(tensor);
    host_.call(CallRecord(normal_, 4, 1)
                   .tensor(tensor.id, geometry)
                   .real(0)
                   .real(1)
                   .generator(1)
                   .returns_nothing());
  }
  void shift_view() {
    const Tensor& tensor = any();
    const Geometry geometry = view(tensor);
    host_.call(CallRecord(add_scalar_, 3, 1)
                   .tensor(tensor.id, geometry)
                   .real(0.5)
                   .integer(1)
                   .returns_nothing());
  }
  // Adds one storage to another, by views of equal size.
  void accumulate() {
    const Tensor &to = any(), &from = any();
    Geometry target = view(to), source = view(from);
    if (to.id == from.id) source = target;
    target.sizes = source.sizes = {std::min(target.sizes[0], source.sizes[0])};
    host_.call(CallRecord(add_, 3, 1)
                   .tensor(to.id, target)
                   .tensor(from.id, source)
                   .real(0.25)
                   .returns_nothing());
  }
  void out() {
    const Tensor& from = any();
    const Tensor result = host_.allocate(from.sizes);
    host_.call(CallRecord(add_out_, 4, 1)
                   .tensor(from)
                   .tensor(from)
                   .integer(2)
                   .tensor(result)
                   .returns_nothing());
    tensors_.push_back(result);
  }
  // Overwrites a contiguous part of one storage, with numbers that another one or itself has.
  void out_part() {
    const Tensor &to = any(), &from = any();
    Geometry target = contiguous(to), source = contiguous(from);
    target.offset = static_cast<int64_t>(below(static_cast<uint64_t>(to.sizes[0])));
    const int64_t count = std::min(to.sizes[0] - target.offset, from.sizes[0]);
    if (to.id == from.id && count > target.offset) return;  // they would overlap
    target.sizes = source.sizes = {count};
    host_.call(CallRecord(add_out_, 4, 1)
                   .tensor(from.id, source)
                   .tensor(from.id, source)
                   .integer(1)
                   .tensor(to.id, target)
                   .returns_nothing());
  }
  void product() {
    const Tensor& from = any();
    const Tensor result{host_.next_id(), from.sizes};
    host_.call(CallRecord(mul_, 2, 1).tensor(from).number(0.75).returns(result));
    tensors_.push_back(result);
  }
  void overwrite() { fill(any(), static_cast<double>(below(100))); }
  void each() {
    std::vector<Tensor> several;
    for (const Tensor& tensor : tensors_) {
      if (below(2) == 0) several.push_back(tensor);
    }
    host_.call(CallRecord(foreach_, 2, 0).tensors(several).real(0.125));
  }
  // Changes running statistics that the schema does not declare as changed.
  void normalise() {
    const Tensor input = host_.allocate({2, kChannels});
    host_.call(
        CallRecord(normal_, 4, 1).tensor(input).real(1).real(2).generator(1).returns_nothing());
    const Tensor result{host_.next_id(), {2, kChannels}};
    const Tensor mean{host_.next_id(), {kChannels}}, deviation{host_.next_id(), {kChannels}};
    host_.call(CallRecord(norm_, 8, 3)
                   .tensor(input)
                   .none()
                   .none()
                   .tensor(statistics_[0])
                   .tensor(statistics_[1])
                   .boolean(true)
                   .real(0.1)
                   .real(1e-5)
                   .returns(result)
                   .returns(mean)
                   .returns(deviation));
    for (const Tensor& tensor : {input, result, mean}) host_.free(tensor.id);
    tensors_.push_back(deviation);
  }
  void free_one() {
    const size_t which = below(tensors_.size());
    host_.free(tensors_[which].id);
    tensors_.erase(tensors_.begin() + static_cast<int64_t>(which));
  }
  // Reuses the same number for another storage at once.
  void again() {
    Tensor& tensor = any();
    tensor.sizes = {size()};
    host_.allocate(tensor.id, tensor.bytes());
  }
  void resize() {
    Tensor& tensor = any();
    tensor.sizes = {size()};
    Writer record;
    record.put<uint64_t>(tensor.id);
    record.put<uint64_t>(tensor.bytes());
    host_.append(RecordKind::resize, 0, record);
  }
  void upload() {
    const Tensor& tensor = any();
    const uint64_t offset = below(tensor.bytes());
    Bytes bytes(1 + below(tensor.bytes() - offset));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    Writer record = read_payload(tensor.id, offset, bytes.size());
    record.put_bytes(bytes.data(), bytes.size());
    host_.append(RecordKind::write, 0, record);
  }
  // As with large uploads: the second piece comes after other records.
  void upload_in_pieces() {
    if (unfinished_) {
      const auto& [tensor, rest] = *unfinished_;
      Writer record = read_payload(tensor.id, tensor.bytes() - rest.size(), rest.size());
      record.put_bytes(rest.data(), rest.size());
      host_.append(RecordKind::write, 0, record);
      unfinished_.reset();
      return;
    }
    const size_t which = below(tensors_.size());
    const Tensor tensor = tensors_[which];
    Bytes bytes(tensor.bytes());
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    const uint64_t first = 1 + below(bytes.size());
    Writer record = read_payload(tensor.id, 0, first);
    record.put_bytes(bytes.data(), first);
    host_.append(RecordKind::write, 0, record);
    if (first == bytes.size()) return;
    unfinished_.emplace(tensor, Bytes(bytes.begin() + static_cast<int64_t>(first), bytes.end()));
    // It is neither freed nor resized meanwhile.
    tensors_.erase(tensors_.begin() + static_cast<int64_t>(which));
    pinned_.push_back(tensor);
  }
  // The number of results is known only after execution.
  void indices() {
    const Tensor& from = any();
    const uint32_t id = host_.next_id();
    const Answer answer =
        host_.request_recorded(CallRecord(nonzero_, 1, 1).tensor(from).returns_number(id));
    if (!answer.ok()) return;
    Reader in(answer.bytes);
    EXPECT_EQ(in.get<Tag>(), Tag::tensor);
    EXPECT_EQ(in.get<uint32_t>(), id);
    found_.emplace_back(id, in.get<uint64_t>());
  }
  // The operator resizes its output.
  void indices_out() {
    if (found_.empty()) return indices();
    auto& [id, bytes] = found_[below(found_.size())];
    Geometry out;
    out.dtype = at::ScalarType::Long;
    out.sizes = {0, 1};
    contiguous_strides(out.sizes, out.strides);
    const Answer answer = host_.request_recorded(
        CallRecord(nonzero_out_, 2, 1).tensor(any()).tensor(id, out).returns_nothing());
    if (!answer.ok()) return;
    Reader in(answer.bytes);
    EXPECT_EQ(in.get<Tag>(), Tag::none);
    if (in.get<uint32_t>() == 0) return;  // nothing was found
    in.get<uint32_t>();                   // argument and element
    bytes = in.get<uint64_t>();
  }
  // Fails, so that its result is lost.
  void wrong() {
    Tensor row = any();
    row.sizes = {1, row.sizes[0]};
    if (row.sizes[1] == 1) return;
    const Tensor result{host_.next_id(), {1, row.sizes[1]}};
    host_.call(CallRecord(mm_, 2, 1).tensor(row).tensor(row).returns(result));
    tensors_.push_back({result.id, {result.sizes[1]}});
    if (below(2) == 0) host_.synchronize();
  }
  // An index that is out of range: the result is lost, or the change in place.
  void fault() {
    const Tensor to = any();
    const Tensor index = host_.upload_indices({1 << 30}, {1});
    faults_.push_back(host_.head());
    if (below(2) == 0) {
      host_.call(
          CallRecord(scatter_, 4, 1).tensor(to).integer(0).tensor(index).real(1).returns_nothing());
    } else {
      const Tensor result{host_.next_id(), {1}};
      host_.call(CallRecord(gather_, 4, 1)
                     .tensor(to)
                     .integer(0)
                     .tensor(index)
                     .boolean(false)
                     .returns(result));
      tensors_.push_back(result);
    }
    host_.free(index.id);
  }
  void part() {
    const Tensor& tensor = any();
    host_.request(RecordKind::read, read_payload(tensor.id, 0, 1 + below(tensor.bytes())));
  }

  Host& host_;
  Random random_;
  uint32_t normal_, add_scalar_, add_, add_out_, mul_, fill_, foreach_, norm_, nonzero_;
  uint32_t nonzero_out_, mm_, gather_, scatter_;
  const bool faulty_;
  std::vector<uint64_t> faults_;
  Tensor statistics_[2];
  std::vector<Tensor> tensors_, pinned_;
  std::optional<std::pair<Tensor, Bytes>> unfinished_;
  std::vector<std::pair<uint32_t, uint64_t>> found_;
};

// Performs an agent's actions on a worker, at random moments.
class Disturber {
 public:
  // `processes`: between which the session moves; empty: it shares nothing.
  Disturber(Host& host, uint64_t seed, std::vector<Replicas*> processes = {})
      : host_(host), random_(seed), processes_(std::move(processes)) {}
  ~Disturber() {
    if (taking_.joinable()) taking_.join();
  }

  void step() {
    switch (random_() % 12) {
      case 0:
      case 1:
      case 2:
        if (!taking_.joinable()) begin(random_() % 4 == 0);
        return;
      case 3:
      case 4:
      case 5:
        finish();
        return;
      case 6:
        if (taking_.joinable() && random_() % 2 == 0) host_.session().hurry();
        return;
      case 7:
        if (!taking_.joinable()) host_.session().trim();
        return;
      case 8:  // the worker ends, perhaps in the middle of a snapshot, whose parts remain
        host_.stop_taking(taking_);
        taken_.reset();
        host_.start(committed_ ? committed_->fd() : -1);
        return;
      case 9:
        if (!taking_.joinable() && committed_) migrate();
        return;
      case 10:
        if (!taking_.joinable() && !processes_.empty()) move();
        return;
      default:
        return;
    }
  }
  void finish() {
    if (!taking_.joinable()) return;
    taking_.join();
    if (!taken_) throw std::runtime_error("a snapshot failed: " + failure_);
    ++snapshots_;
    // Sometimes the agent dies before it has recorded the snapshot.
    if (random_() % 5 != 0) commit();
    taken_.reset();
  }
  int snapshots() const { return snapshots_; }
  int moves() const { return moves_; }

 private:
  void begin(bool stop) {
    taken_.reset();
    taking_ = std::thread([this, stop] {
      try {
        uint64_t position = 0;
        const int fd = host_.snapshot(&position, stop);
        taken_ = std::make_unique<File>(fd);
        position_ = position;
      } catch (const std::exception& error) {
        failure_ = error.what();
      }
    });
  }
  void commit() {
    committed_ = std::move(taken_);
    host_.commit(position_);
  }
  // Another worker prepares from the newest snapshot, adopts a newer one, and continues.
  void migrate() {
    const bool adopts = random_() % 3 != 0;
    host_.prepare(committed_->fd());
    if (adopts) {
      host_.session().orders().gate(false);
      uint64_t position = 0;
      taken_ = std::make_unique<File>(host_.snapshot(&position, true));
      position_ = position;
      commit();
      host_.prepared().adopt(committed_->fd());
    }
    host_.take_over();
  }
  // It continues in another process, which may have parts of its state.
  void move() {
    Replicas* const there = processes_[random_() % processes_.size()];
    host_.session().orders().gate(false);
    const auto pinned = there->pin();
    const KnownContents known = read_known(File(write_known(pinned.ids)).fd());
    if (random_() % 2 == 0) host_.session().preallocate();
    const Departed departed = host_.session().depart(known);
    host_.options.replicas = there;
    host_.prepare(departed.tables.fd(), departed.contents.fd(), departed.carried.fd(),
                  committed_ ? committed_->fd() : -1);
    host_.take_over();
    ++moves_;
  }

  Host& host_;
  Random random_;
  std::vector<Replicas*> processes_;
  std::thread taking_;
  std::unique_ptr<File> taken_, committed_;
  uint64_t position_ = 0;
  std::string failure_;
  int snapshots_ = 0;
  int moves_ = 0;
};

}  // namespace sing::test
