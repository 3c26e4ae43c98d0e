// Fuzzes the inputs of a worker. Bytes of a log: whatever they contain, the worker executes them,
// reports an operator's error, or calls the log corrupt. The tables of a snapshot (which begin with
// its magic): the worker starts from them, or refuses them.
//
// libFuzzer calls LLVMFuzzerTestOneInput. Without libFuzzer (g++ has none), the driver below
// mutates records that were made by a client, for a bounded time:
//   fuzz_records --seconds 30 [--seed N]
// An input that ends the process is left beside the program as crash.bin; `fuzz_records FILE` runs
// it alone.
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/harness.h"

namespace {

using namespace sing;
using test::Bytes;
using test::CallRecord;
using test::Tensor;

// Operators that are harmless with all operands: no files, no time or memory beyond that of their
// operands.
bool is_harmless(std::string_view name) {
  static constexpr std::array<std::string_view, 14> names = {"aten::add.Tensor",
                                                             "aten::add.out",
                                                             "aten::mul.Tensor",
                                                             "aten::neg",
                                                             "aten::mm",
                                                             "aten::sum",
                                                             "aten::_foreach_add_.Scalar",
                                                             "aten::uniform_",
                                                             "aten::cat",
                                                             "aten::nonzero",
                                                             "aten::index.Tensor",
                                                             "aten::zero_",
                                                             "aten::clone",
                                                             "aten::_local_scalar_dense"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr uint64_t kGranted = 1 << 20;
constexpr int64_t kElementsMax = 256;  // broadcasting costs time and memory, too

// Records that a client could have written, at least one of each kind.
std::vector<Bytes> seeds() {
  test::Host host;
  std::vector<Bytes> records;
  uint64_t begin = 0;
  const auto take = [&] {
    records.push_back(host.log_bytes(begin, host.head()));
    begin = host.head();
  };
  static constexpr std::array<std::pair<const char*, const char*>, 14> names = {{
      {"aten::add", "Tensor"},
      {"aten::add", "out"},
      {"aten::mul", "Tensor"},
      {"aten::neg", ""},
      {"aten::mm", ""},
      {"aten::sum", ""},
      {"aten::_foreach_add_", "Scalar"},
      {"aten::uniform_", ""},
      {"aten::cat", ""},
      {"aten::nonzero", ""},
      {"aten::index", "Tensor"},
      {"aten::zero_", ""},
      {"aten::clone", ""},
      {"aten::_local_scalar_dense", ""},
  }};
  std::array<uint32_t, names.size()> ops{};
  for (size_t i = 0; i < names.size(); ++i) ops[i] = host.define(names[i].first, names[i].second);
  take();
  const Tensor a = host.upload({1, 2, 3, 4}, {2, 2});
  const Tensor b = host.upload({5, 6, 7, 8}, {2, 2});
  const Tensor c = host.allocate({2, 2});
  take();
  const auto fresh = [&](std::vector<int64_t> sizes) { return Tensor{host.next_id(), sizes}; };
  host.call(CallRecord(ops[0], 3, 1).tensor(a).tensor(b).integer(1).returns(fresh({2, 2})));
  take();
  host.call(CallRecord(ops[1], 4, 1).tensor(a).tensor(b).real(1).tensor(c).returns_nothing());
  take();
  host.call(CallRecord(ops[2], 2, 1).tensor(a).number(3).returns(fresh({2, 2})));
  take();
  host.call(CallRecord(ops[3], 1, 1).tensor(a).returns(fresh({2, 2})));
  take();
  host.call(CallRecord(ops[4], 2, 1).tensor(a).tensor(b).returns(fresh({2, 2})));
  take();
  host.call(CallRecord(ops[5], 2, 1).tensor(a).none().returns(fresh({})));
  take();
  host.call(CallRecord(ops[6], 2, 0).tensors({a, b}).real(0.5));
  take();
  host.call(CallRecord(ops[7], 4, 1).tensor(c).real(0).real(1).generator(1).returns_nothing());
  take();
  host.call(CallRecord(ops[8], 2, 1).tensors({a, b}).integer(0).returns(fresh({4, 2})));
  take();
  const auto request = [&](const CallRecord& call) {
    host.append(RecordKind::call, kRequest, call.payload());
    take();
  };
  request(CallRecord(ops[9], 1, 1).tensor(a).returns_number(host.next_id()));
  request(CallRecord(ops[13], 1, 1).tensor(host.upload({1}, {})).returns_nothing());
  const Compound coo{at::kSparse, false, 2, {2, 2}}, csr{at::kSparseCsr, false, 0, {2, 2}};
  const Tensor indices = host.upload_indices({0, 1, 1, 0}, {2, 2});
  const Tensor rows = host.upload_indices({0, 1, 2}, {3});
  const Tensor columns = host.upload_indices({1, 0}, {2});
  const Tensor values = host.upload({1, 2}, {2});
  take();
  const auto numbers = [&] {
    return std::array<uint32_t, 3>{host.next_id(), host.next_id(), host.next_id()};
  };
  request(CallRecord(ops[0], 3, 1)
              .sparse(coo, {indices, values})
              .sparse(coo, {indices, values})
              .integer(1)
              .returns_numbers(numbers()));
  request(CallRecord(ops[4], 2, 1)
              .sparse(csr, {rows, columns, values})
              .tensor(a)
              .returns_numbers(numbers()));
  request(
      CallRecord(ops[12], 2, 1).sparse(coo, {indices, values}).none().returns_numbers(numbers()));
  host.append(RecordKind::read, kRequest, test::read_payload(a.id, 4, 8));
  take();
  host.append(RecordKind::synchronize, kRequest, Writer());
  take();
  host.generator(1, GeneratorAction::seed, 7);
  host.generator(2, GeneratorAction::copy, 1);
  take();
  Writer event;
  event.put<uint64_t>(1);
  host.append(RecordKind::event, 0, event);
  take();
  Writer settings;
  Settings flags{};
  read_settings(flags);
  put_settings(settings, flags);
  host.append(RecordKind::settings, 0, settings);
  take();
  Writer resize;
  resize.put<uint64_t>(a.id);
  resize.put<uint64_t>(64);
  host.append(RecordKind::resize, 0, resize);
  take();
  host.free(b.id);
  take();
  return records;
}

// One state executes many inputs, as a worker executes a long log; it is replaced from time to
// time.
struct Target {
  Word<uint64_t> granted{kGranted};
  ClientPage client{};
  test::Host host;
  Orders orders{host.worker()};
  State state{c10::Device(c10::DeviceType::CPU), &granted, {is_harmless, kElementsMax}};
  Answers answers{client, host.worker_page(), orders};
  MemoryFailures memory_failures{host.worker(), host.agent()};
  Executor executor{state, answers, memory_failures};
  uint64_t position = 0;

  // Executes whole records until the first that is corrupt.
  void execute(std::span<const std::byte> log) {
    // Copies the bytes to a buffer of exactly their size: the sanitizer detects every access beyond
    // it.
    std::vector<std::byte> bytes(log.begin(), log.end());
    std::span<const std::byte> rest(bytes);
    while (rest.size() >= sizeof(RecordHeader)) {
      RecordHeader header;
      std::memcpy(&header, rest.data(), sizeof(header));
      if (!valid(header, rest.size())) return;
      // The client waits for all answers, and has taken all of each.
      client.answer_wanted.store(position + header.bytes);
      client.answer_taken.store(0);
      try {
        executor.execute(position, header, rest.subspan(8, header.bytes - 8));
      } catch (const CorruptLog&) {
        return;
      }
      position += header.bytes;
      rest = rest.subspan(header.bytes);
    }
  }
};

constexpr uint64_t kArenaBytes = 1 << 20;

// Tables of a session that has an example of every kind of state.
Bytes snapshot_seed() {
  test::Host host;
  host.start();
  const Tensor large = host.upload(std::vector<float>(3000, 1), {3000});
  host.upload({1, 2}, {2});
  host.allocate({7});
  const auto mm = host.define("aten::mm");
  host.call(CallRecord(mm, 2, 1).tensor(large).tensor(large).returns({host.next_id(), {4}}));
  host.generator(1, GeneratorAction::seed, 7);
  Writer settings;
  Settings values{};
  read_settings(values);
  put_settings(settings, values);
  host.append(RecordKind::settings, 0, settings);
  while (host.worker().consumed.load() != host.head()) sched_yield();
  const File file(host.snapshot());
  Bytes bytes(file_bytes(file.fd()));
  read_file(file.fd(), 0, bytes);
  return bytes;
}

bool is_snapshot(std::span<const std::byte> bytes) {
  return bytes.size() >= sizeof(kSnapshotMagic) &&
         std::memcmp(bytes.data(), &kSnapshotMagic, sizeof(kSnapshotMagic)) == 0;
}

void load(std::span<const std::byte> bytes) {
  static const File arena = [] {
    File file(memfd_create("arena", 0));
    Arena(file.fd()).grow(kArenaBytes);
    return file;
  }();
  // Fix the sizes that most mutations break; otherwise nearly all inputs would be rejected as
  // truncated.
  std::vector<std::byte> whole(bytes.begin(), bytes.end());
  SnapshotHeader header{};
  if (whole.size() >= sizeof(header)) {
    std::memcpy(&header, whole.data(), sizeof(header));
    const uint64_t rest = whole.size() - sizeof(header);
    header.total_bytes = whole.size();
    header.extents_count = std::min<uint64_t>(header.extents_count, rest / sizeof(ExtentEntry));
    header.table_bytes = rest - header.extents_count * sizeof(ExtentEntry);
    std::memcpy(whole.data(), &header, sizeof(header));
  }
  const File file(memfd_create("tables", 0));
  write_file(file.fd(), 0, whole);
  AgentPage agent{};
  WorkerPage page{};
  Orders orders(page);
  // Storages of any size may be named; none that has bytes is larger than these.
  Word<uint64_t> granted{kGranted};
  State state(c10::Device(c10::DeviceType::CPU), &granted, {is_harmless, kElementsMax});
  Snapshots snapshots(state, arena.fd(), agent, orders, 1);
  try {
    snapshots.open(file.fd(), -1);
    snapshots.finish_loading();
  } catch (const std::exception&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static std::unique_ptr<Target> target;
  static int inputs = 0;
  static const std::vector<Bytes> known = seeds();
  if (size > 16384) return 0;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  if (is_snapshot(bytes)) {
    load(bytes);
    return 0;
  }
  if (inputs++ % 200 == 0) {
    target = std::make_unique<Target>();
    target->execute(known[0]);
    target->execute(known[1]);
  }
  target->execute(bytes);
  return 0;
}

#ifndef SING_LIBFUZZER
namespace {

using Random = std::mt19937_64;

void mutate(Bytes& bytes, Random& random, const std::vector<Bytes>& corpus) {
  static constexpr std::array<int64_t, 12> odd = {0,     1,  -1, 2, 255, 256,
                                                  65535, 64, 63, 3, 127, INT64_MIN};
  const auto at = [&](size_t room) {
    return random() % (bytes.size() > room ? bytes.size() - room : 1);
  };
  switch (random() % 8) {
    case 0:
      bytes[at(0)] = static_cast<std::byte>(random());
      return;
    case 1:
      bytes[at(0)] ^= static_cast<std::byte>(1 << (random() % 8));
      return;
    case 2:
    case 3: {
      const int64_t value = odd[random() % odd.size()];
      const size_t width = size_t{1} << (random() % 4);
      if (bytes.size() >= width) std::memcpy(bytes.data() + at(width), &value, width);
      return;
    }
    case 4:  // shorter or longer by words, with a header that agrees
      bytes.resize(std::max<size_t>(8, (bytes.size() + random() % 32) & ~size_t{7}));
      break;
    case 5:
      bytes.resize(std::max<size_t>(8, at(0) & ~size_t{7}));
      break;
    case 6: {
      const Bytes& other = corpus[random() % corpus.size()];
      const size_t count = std::min(bytes.size(), other.size());
      const size_t from = random() % count;
      std::memcpy(bytes.data() + from, other.data() + from, count - from);
      return;
    }
    default: {
      const Bytes& other = corpus[random() % corpus.size()];
      bytes.insert(bytes.end(), other.begin(), other.end());
      return;
    }
  }
  const auto size = static_cast<uint32_t>(bytes.size());
  std::memcpy(bytes.data(), &size, sizeof(size));
}

int run_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 20;
  uint64_t seed = std::random_device()();
  const auto crash = std::filesystem::path(argv[0]).replace_filename("crash.bin");
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--seconds" && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else if (option == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      return run_file(argv[i]);
    }
  }
  std::printf("fuzzing records for %.0f s, seed %llu\n", seconds,
              static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  Random random(seed);
  const std::vector<Bytes> corpus = seeds();
  const Bytes snapshot = snapshot_seed();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t runs = 0;
  for (; runs % 64 != 0 || std::chrono::steady_clock::now() < end; ++runs) {
    const bool tables = runs % 8 == 0;
    Bytes bytes = tables ? snapshot : corpus[random() % corpus.size()];
    for (uint64_t i = random() % 6; i > 0; --i) mutate(bytes, random, corpus);
    if (tables) std::memcpy(bytes.data(), &kSnapshotMagic, sizeof(kSnapshotMagic));
    std::ofstream(crash, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<long>(bytes.size()));
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  std::filesystem::remove(crash);
  std::printf("%llu inputs, nothing found\n", static_cast<unsigned long long>(runs));
  return 0;
}
#endif
