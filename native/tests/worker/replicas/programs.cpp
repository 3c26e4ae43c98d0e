// Random programs of sessions that hold equal bytes once end as if each was alone.
#include <cstdio>
#include <exception>
#include <random>

#include "tests/check.h"
#include "tests/harness.h"
#include "tests/worker/exec/random_program.h"
#include "worker/replicas/replicas.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr int kSteps = 80;

std::vector<Bytes> alone(uint64_t seed) {
  Host host(size_t{256} << 20);
  host.start();
  Program program(host, seed);
  for (int i = 0; i < kSteps; ++i) program.step();
  return program.result();
}

// Two sessions execute the same program, another one a program of its own.
void compare(uint64_t seed, bool disturbed, Replicas::Figures& sum, int& moves) {
  const uint64_t seeds[] = {seed, seed, seed + 1'000'000};
  Replicas replicas, elsewhere;
  struct Session {
    Host host{size_t{256} << 20};
    std::optional<Program> program;
    std::optional<Disturber> disturber;
  };
  std::vector<std::unique_ptr<Session>> sessions;
  for (const uint64_t each : seeds) {
    auto session = std::make_unique<Session>();
    session->host.options.replicas = &replicas;
    session->host.options.limits.check_splicing = true;
    session->host.options.limits.piece_bytes = 4096;
    session->host.options.limits.mapped_bytes = uint64_t{4096} << seed % 5;
    session->host.start();
    session->program.emplace(session->host, each);
    if (disturbed) {
      session->disturber.emplace(session->host, seed + sessions.size(),
                                 std::vector<Replicas*>{&replicas, &elsewhere});
    }
    sessions.push_back(std::move(session));
  }
  for (int i = 0; i < kSteps; ++i) {
    for (auto& session : sessions) {
      session->program->step();
      if (disturbed) session->disturber->step();
    }
  }
  for (size_t i = 0; i < sessions.size(); ++i) {
    if (disturbed) {
      sessions[i]->disturber->finish();
      moves += sessions[i]->disturber->moves();
    }
    const auto found = sessions[i]->program->result(), expected = alone(seeds[i]);
    EXPECT_EQ(found.size(), expected.size());
    for (size_t k = 0; k < found.size(); ++k) {
      if (found[k] != expected[k]) {
        throw CheckFailed("result " + std::to_string(k) + " of session " + std::to_string(i) +
                          " differs");
      }
    }
  }
  for (const Replicas* each : {&replicas, &elsewhere}) {
    sum.squashed += each->figures().squashed;
    sum.executed += each->figures().executed;
  }
  sessions.clear();
  for (const Replicas* each : {&replicas, &elsewhere}) {
    EXPECT_EQ(each->figures().versions, uint64_t{0});
  }
}

void compare_all(bool disturbed) {
  Replicas::Figures sum{};
  int moves = 0;
  const uint64_t fresh = std::random_device()();
  for (uint64_t i = 0; i < 40; ++i) {
    const uint64_t seed = i < 20 ? i + 1 : fresh + i;
    try {
      compare(seed, disturbed, sum, moves);
    } catch (const std::exception& error) {
      throw CheckFailed("program " + std::to_string(seed) + ": " + error.what());
    }
  }
  std::printf("      %llu calls squashed, %llu executed; %d moves\n",
              static_cast<unsigned long long>(sum.squashed),
              static_cast<unsigned long long>(sum.executed), moves);
  EXPECT(!disturbed || moves > 100);
  EXPECT(sum.squashed > 100);
}

}  // namespace

TEST(random_programs_with_replicas_end_as_alone) { compare_all(false); }

TEST(random_programs_with_replicas_survive_whatever_happens_to_their_workers) { compare_all(true); }
