#include "tests/harness.h"

#include <sys/mman.h>
#include <unistd.h>

#include "oplog/futex.h"

namespace sing::test {

namespace {

constexpr std::chrono::seconds kPatience(60);  // longer than this, and a test has failed

int shared_file(size_t bytes) {
  const int fd = memfd_create("test", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw_errno("memfd");
  return fd;
}

template <class T>
Page<T> fresh_page(int fd, size_t following = 0) {
  Page<T> page(map_file(fd, kPageBytes + following, true));
  page->magic = kMagic;
  page->version = kLayoutVersion;
  return page;
}

}  // namespace

uint64_t Tensor::count() const {
  uint64_t count = 1;
  for (const int64_t size : sizes) count *= static_cast<uint64_t>(size);
  return count;
}

Geometry contiguous(const Tensor& tensor) {
  Geometry geometry;
  geometry.dtype = tensor.dtype;
  geometry.sizes.assign(tensor.sizes.begin(), tensor.sizes.end());
  contiguous_strides(geometry.sizes, geometry.strides);
  return geometry;
}

ErrorKind Answer::kind() const { return Reader(bytes).get<ErrorKind>(); }

std::string Answer::operation() const {
  Reader in(bytes);
  in.get_bytes(9);
  return std::string(in.get_string());
}

std::string Answer::message() const {
  Reader in(bytes);
  in.get_bytes(9);
  in.get_string();
  return std::string(in.get_string());
}

// ---------------------------------------------------------------- calls

CallRecord::CallRecord(uint32_t op, uint16_t arguments, uint16_t returns) {
  out_.put<uint32_t>(op);
  out_.put<uint16_t>(arguments);
  out_.put<uint16_t>(returns);
}

CallRecord& CallRecord::tensor(uint32_t id, const Geometry& geometry) {
  out_.put(Tag::tensor);
  out_.put<uint32_t>(id);
  put_geometry(out_, geometry);
  return *this;
}

CallRecord& CallRecord::tensor(const Tensor& tensor, uint8_t flags) {
  Geometry geometry = contiguous(tensor);
  geometry.flags = flags;
  return this->tensor(tensor.id, geometry);
}

CallRecord& CallRecord::tensors(const std::vector<Tensor>& tensors) {
  out_.put(Tag::list);
  out_.put<uint32_t>(static_cast<uint32_t>(tensors.size()));
  for (const Tensor& one : tensors) tensor(one);
  return *this;
}

CallRecord& CallRecord::integer(int64_t value) {
  out_.put(Tag::integer);
  out_.put<int64_t>(value);
  return *this;
}

CallRecord& CallRecord::real(double value) {
  out_.put(Tag::real);
  out_.put<double>(value);
  return *this;
}

CallRecord& CallRecord::boolean(bool value) {
  out_.put(Tag::boolean);
  out_.put<uint8_t>(value);
  return *this;
}

CallRecord& CallRecord::integers(const std::vector<int64_t>& values) {
  out_.put(Tag::integers);
  out_.put<uint32_t>(static_cast<uint32_t>(values.size()));
  for (const int64_t value : values) out_.put<int64_t>(value);
  return *this;
}

CallRecord& CallRecord::string(const std::string& value) {
  out_.put(Tag::string);
  out_.put_string(value);
  return *this;
}

CallRecord& CallRecord::none() {
  out_.put(Tag::none);
  return *this;
}

CallRecord& CallRecord::number(double value) {
  out_.put(Tag::host_tensor);
  Geometry geometry;
  geometry.dtype = at::ScalarType::Double;
  geometry.flags = kWrappedNumber;
  put_geometry(out_, geometry);
  out_.put<uint32_t>(sizeof(value));
  out_.put<double>(value);
  return *this;
}

CallRecord& CallRecord::generator(uint32_t number) {
  out_.put(Tag::generator);
  out_.put<uint32_t>(number);
  return *this;
}

CallRecord& CallRecord::returns_nothing() { return none(); }

CallRecord& CallRecord::returns(const Tensor& tensor) {
  return returns(tensor, contiguous(tensor), tensor.bytes());
}

CallRecord& CallRecord::returns(const Tensor& tensor, const Geometry& geometry, uint64_t bytes) {
  out_.put(Tag::tensor);
  out_.put<uint32_t>(tensor.id);
  out_.put<uint64_t>(bytes);
  put_geometry(out_, geometry);
  return *this;
}

CallRecord& CallRecord::returns_number(uint32_t id) {
  out_.put(Tag::tensor);
  out_.put<uint32_t>(id);
  return *this;
}

CallRecord& CallRecord::sparse(const Compound& compound, const std::vector<Tensor>& parts) {
  out_.put(Tag::compound);
  put_compound(out_, compound);
  for (const Tensor& part : parts) tensor(part);
  return *this;
}

CallRecord& CallRecord::returns_numbers(const std::array<uint32_t, 3>& numbers) {
  out_.put(Tag::compound);
  for (const uint32_t number : numbers) out_.put<uint32_t>(number);
  return *this;
}

Writer read_payload(uint32_t id, uint64_t offset, uint64_t count) {
  Writer out;
  out.put<uint32_t>(id);
  out.put<uint32_t>(0);
  out.put<uint64_t>(offset);
  out.put<uint64_t>(count);
  return out;
}

// ---------------------------------------------------------------- host

Host::Host(size_t capacity)
    : log_file_(shared_file(capacity)),
      client_file_(shared_file(kPageBytes)),
      worker_file_(shared_file(kPageBytes + kAnswerRingBytes)),
      agent_file_(shared_file(kPageBytes)),
      arena_file_(shared_file(0)),
      log_(map_ring(log_file_.fd(), capacity, true)),
      capacity_(capacity),
      client_(fresh_page<ClientPage>(client_file_.fd())),
      worker_(fresh_page<WorkerPage>(worker_file_.fd(), kAnswerRingBytes)),
      agent_(fresh_page<AgentPage>(agent_file_.fd())) {
  grant(uint64_t{4} << 30);
}

Host::~Host() {
  if (running()) stop();
}

SessionFiles Host::files(int snapshot, int readiness, int contents, int carried, int base) const {
  return {log_file_.fd(), client_file_.fd(), worker_file_.fd(), agent_file_.fd(), arena_file_.fd(),
          snapshot,       readiness,         contents,          carried,          base};
}

void Host::start(int snapshot_fd, int readiness_fd) {
  session_.reset();
  session_ = std::make_unique<Session>(files(snapshot_fd, readiness_fd), options);
  run();
}

void Host::prepare(int snapshot_fd, int contents_fd, int carried_fd, int base_fd) {
  SessionOptions prepared = options;
  prepared.prepare = true;
  ++prepared.epoch;
  prepared_ =
      std::make_unique<Session>(files(snapshot_fd, -1, contents_fd, carried_fd, base_fd), prepared);
}

void Host::take_over() {
  stop();
  session_ = std::move(prepared_);
  session_->gate(true);
  run();
}

void Host::run() {
  over_ = false;
  corruption_.clear();
  lost_.reset();
  thread_ = std::thread([this] {
    t_executed = &worker_->consumed;
    try {
      session_->run();
    } catch (const DeviceLost& lost) {
      corruption_ = lost.what();
      lost_.emplace(lost);
    } catch (const std::exception& fault) {
      corruption_ = fault.what();
    }
    over_ = true;
    worker_->bell.fetch_add(1);
    futex_wake(&worker_->bell);
  });
}

void Host::stop() {
  session_->end();
  thread_.join();
  session_.reset();
  ++options.epoch;
}

void Host::stop_taking(std::thread& taking) {
  session_->end();
  thread_.join();
  if (taking.joinable()) taking.join();
  session_.reset();
  ++options.epoch;
}

std::string Host::corruption() {
  wait([&] { return over_.load(); });
  thread_.join();
  session_.reset();
  return corruption_;
}

DeviceLost Host::lost() {
  const std::string text = corruption();
  if (!lost_) throw std::runtime_error("the device was not lost: " + text);
  return *lost_;
}

int Host::snapshot(uint64_t* position, bool stop) {
  const Taken taken = session_->snapshot(stop ? Manner::stop : Manner::beside);
  if (position) *position = taken.position;
  return taken.fd;
}

// ---------------------------------------------------------------- client

template <class Ready>
void Host::wait(Ready ready) {
  client_->sleepers.fetch_add(1);
  while (true) {
    const uint32_t seen = worker_->bell.load();
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (ready()) break;
    if (over_ && on_over) {
      on_over();
      continue;
    }
    if (over_) {
      client_->sleepers.fetch_sub(1);
      throw std::runtime_error("the worker is over: " + corruption_);
    }
    if (futex_wait(&worker_->bell, seen, kPatience) == Woken::timed_out) {
      throw std::runtime_error("the worker does nothing");
    }
  }
  client_->sleepers.fetch_sub(1);
}

void Host::publish(bool requested) {
  client_->head.store(head_, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const auto rest = static_cast<Rest>(worker_->asleep.load());
  if (rest == Rest::asleep || (rest == Rest::napping && requested)) {
    futex_wake(low_half(client_->head));
  }
}

uint64_t Host::append_raw(const void* bytes, size_t count) {
  std::memcpy(log_.data() + head_ % capacity_, bytes, count);
  head_ += count;
  publish(true);
  return head_;
}

uint64_t Host::append(RecordKind kind, uint8_t flags, const Writer& payload) {
  const size_t bytes = sizeof(RecordHeader) + padded(payload.size());
  // A test's log is short: executed records are not needed again.
  while (head_ + bytes - agent_->retained.load() > capacity_) throw std::runtime_error("log full");
  const RecordHeader header{static_cast<uint32_t>(bytes), static_cast<uint8_t>(kind), flags, 0};
  std::byte* at = log_.data() + head_ % capacity_;
  std::memset(at, 0, bytes);
  std::memcpy(at, &header, sizeof(header));
  if (payload.size()) std::memcpy(at + sizeof(header), payload.view().data(), payload.size());
  head_ += bytes;
  publish((flags & kRequest) != 0);
  return head_;
}

uint32_t Host::define(const std::string& name, const std::string& overload) {
  Writer out;
  out.put<uint32_t>(ops_);
  out.put_string(name);
  out.put_string(overload);
  append(RecordKind::define, 0, out);
  return ops_++;
}

void Host::allocate(uint32_t id, uint64_t bytes) {
  Writer out;
  out.put<uint32_t>(1);
  out.put<uint32_t>(0);
  out.put(StorageEntry{id, static_cast<uint32_t>(StorageAction::allocate), bytes});
  append(RecordKind::storages, 0, out);
}

void Host::free(uint32_t id) {
  Writer out;
  out.put<uint32_t>(1);
  out.put<uint32_t>(0);
  out.put(StorageEntry{id, static_cast<uint32_t>(StorageAction::free), 0});
  append(RecordKind::storages, 0, out);
}

Tensor Host::allocate(std::vector<int64_t> sizes, at::ScalarType dtype) {
  Tensor tensor{next_id(), std::move(sizes), dtype};
  allocate(tensor.id, tensor.bytes());
  return tensor;
}

void Host::write(const Tensor& tensor, const void* data) {
  Writer out = read_payload(tensor.id, 0, tensor.bytes());
  out.put_bytes(data, tensor.bytes());
  append(RecordKind::write, 0, out);
}

Tensor Host::upload(const std::vector<float>& values, std::vector<int64_t> sizes) {
  const Tensor tensor = allocate(std::move(sizes));
  write(tensor, values.data());
  return tensor;
}

Tensor Host::upload_indices(const std::vector<int64_t>& values, std::vector<int64_t> sizes) {
  const Tensor tensor = allocate(std::move(sizes), at::ScalarType::Long);
  write(tensor, values.data());
  return tensor;
}

uint64_t Host::begin_request(RecordKind kind, const Writer& payload, uint8_t flags) {
  const uint64_t position = head_ + sizeof(RecordHeader) + padded(payload.size());
  client_->answer_taken.store(0);
  client_->answer_wanted.store(position);
  append(kind, kRequest | flags, payload);
  return position;
}

void Host::wait_answer(uint64_t position) {
  wait([&] { return worker_->answer_position.load() == position; });
}

uint64_t Host::take(Bytes& into, uint64_t most) {
  uint64_t taken = into.size();
  const uint64_t position = client_->answer_wanted.load();
  wait([&] {
    if (client_->answer_generation.load() != worker_->answer_generation.load()) taken = 0;
    return worker_->answer_position.load() == position && worker_->answer_produced.load() > taken;
  });
  if (client_->answer_generation.load() != worker_->answer_generation.load()) {
    into.clear();
    client_->answer_taken.store(0);
    client_->answer_generation.store(worker_->answer_generation.load());
  }
  const uint64_t at = taken % kAnswerRingBytes;
  const uint64_t count =
      std::min({most, worker_->answer_produced.load() - taken, kAnswerRingBytes - at});
  into.resize(taken + count);
  std::memcpy(into.data() + taken, worker_.following().data() + at, count);
  client_->answer_taken.store(taken + count);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (worker_->asleep.load() != 0) futex_wake(low_half(client_->answer_taken));
  return count;
}

void Host::abandon() {
  record_answer(client_->answer_wanted.load(), {AnswerStatus::error, {}});
  client_->answer_wanted.store(0);
  client_->answer_taken.store(UINT64_MAX);
  futex_wake(low_half(client_->answer_taken));
}

void Host::replace(uint64_t end, const CallRecord& call) {
  const auto payload = call.payload().view();
  std::memcpy(log_.data() + (end - padded(payload.size())) % capacity_, payload.data(),
              payload.size());
}

Answer Host::request(RecordKind kind, const Writer& payload, uint8_t flags) {
  const uint64_t position = begin_request(kind, payload, flags);
  wait_answer(position);
  Answer answer;
  answer.status = static_cast<AnswerStatus>(worker_->answer_status.load());
  const uint64_t bytes = worker_->answer_bytes.load();
  while (answer.bytes.size() < bytes) take(answer.bytes, bytes);
  if (on_answer) on_answer(position, answer);
  if (!answer.ok()) record_answer(position, {answer.status, {}});
  client_->answer_wanted.store(0);
  return answer;
}

void Host::record_answer(uint64_t position, const Answer& answer) {
  Writer out;
  out.put<uint64_t>(position);
  out.put<uint32_t>(static_cast<uint32_t>(answer.status));
  out.put<uint32_t>(static_cast<uint32_t>(answer.bytes.size()));
  out.put_bytes(answer.bytes.data(), answer.bytes.size());
  append(RecordKind::answered, 0, out);
}

Answer Host::request_recorded(const CallRecord& call) {
  const Answer answer = request_call(call);
  if (answer.ok()) record_answer(head_, answer);
  return answer;
}

Answer Host::request_call(const CallRecord& call) {
  return request(RecordKind::call, call.payload());
}

Answer Host::read(const Tensor& tensor) {
  return request(RecordKind::read, read_payload(tensor.id, 0, tensor.bytes()));
}

std::vector<float> Host::values(const Tensor& tensor) {
  const Answer answer = read(tensor);
  if (!answer.ok()) throw std::runtime_error("read failed: " + answer.message());
  std::vector<float> values(answer.bytes.size() / sizeof(float));
  std::memcpy(values.data(), answer.bytes.data(), answer.bytes.size());
  return values;
}

void Host::generator(uint32_t number, GeneratorAction action, uint64_t seed) {
  Writer out;
  out.put<uint32_t>(number);
  out.put(action);
  out.put_bytes("\0\0\0", 3);
  out.put<uint64_t>(seed);
  append(RecordKind::generator, 0, out);
}

Bytes Host::generator_state(uint32_t number) {
  Writer out;
  out.put<uint32_t>(number);
  out.put(GeneratorAction::get_state);
  out.put_bytes("\0\0\0", 3);
  const Answer answer = request(RecordKind::generator, out);
  if (!answer.ok()) throw std::runtime_error(answer.message());
  return answer.bytes;
}

void Host::wait_consumed() {
  if (!synchronize().ok()) throw std::runtime_error("an error was pending");
}

}  // namespace sing::test
