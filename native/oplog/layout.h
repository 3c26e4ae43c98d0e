// Shared memory of one device session: what the three processes map, and who writes what.
//
// A session has four memfds. Each page has exactly one writer, so no process ever performs a
// read-modify-write on another's word, and a hostile notebook cannot touch the gate, its memory
// grant or the answers (its descriptors of those pages are read-only).
//
//   log     written by the client   ring of `capacity` bytes, mapped twice in a row
//   client  written by the client   ClientPage
//   worker  written by the worker   WorkerPage, then the answer ring
//   agent   written by the agent    AgentPage
//
// Positions are 64-bit byte counts that never wrap; byte p of the log lies at p % capacity.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sing {

inline constexpr uint64_t kMagic = 0x31474e4953594a31;  // "1JYSING1"
inline constexpr uint32_t kLayoutVersion = 2;
inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kAnswerRingBytes = size_t{4} << 20;
inline constexpr size_t kAnswerChunkBytes = size_t{512} << 10;  // published piecewise
inline constexpr size_t kRecordBytesMax = size_t{16} << 20;
inline constexpr size_t kLine = 64;
inline constexpr uint32_t kMemoryFailuresMax = 256;

template <class T>
using Word = std::atomic<T>;
static_assert(Word<uint64_t>::is_always_lock_free && Word<uint32_t>::is_always_lock_free);

// State of the session's worker, as seen by the client (AgentPage::presence).
enum class Presence : uint32_t {
  absent = 0,   // no worker: after an append, ring the agent's bell
  present = 1,  // a worker runs: wake it if it sleeps
  ended = 2,    // the session has ended: AgentPage::reason says why, and nothing will be executed
};

struct ClientPage {
  uint64_t magic;
  uint32_t version;
  uint32_t pid;
  // Futex word: the low half of head. Bytes below head are complete records.
  alignas(kLine) Word<uint64_t> head;
  // Number of threads that sleep on WorkerPage::bell.
  alignas(kLine) Word<uint32_t> sleepers;
  // End position of the request whose answer is awaited, 0 if none. Set before head covers it.
  Word<uint64_t> answer_wanted;
  // Bytes of that answer that were copied out. Futex word: the low half.
  Word<uint64_t> answer_taken;
  // Position for which threads of the client wait, 0 if none.
  Word<uint64_t> progress_wanted;
  // Device bytes of live storages, now and at peak; bytes requested from the agent (with a
  // sequence).
  alignas(kLine) Word<uint64_t> memory_used;
  Word<uint64_t> memory_peak;
  Word<uint64_t> memory_wanted;
  Word<uint64_t> want_sequence;
  Word<uint64_t> operators;
  // Activity in the notebook: cells that run now, CLOCK_MONOTONIC of the last change, cells that
  // have ended since the client connected.
  alignas(kLine) Word<uint32_t> cells_running;
  Word<uint64_t> cell_changed_ns;
  Word<uint64_t> cells_ended;
  // The WorkerPage::answer_generation to which answer_taken refers.
  Word<uint64_t> answer_generation;
  // Whether the program waits for other ranks of its job: 0: no; 1: a thread of it does, but it may
  // continue; 2: it does. See Note [Turns] in native/worker/loop/seat.h.
  Word<uint32_t> awaiting_peers;
};

struct WorkerPage {
  uint64_t magic;
  uint32_t version;
  uint32_t pid;
  // Every record below this position has been executed, or given to a device that works behind the
  // worker.
  alignas(kLine) Word<uint64_t> consumed;
  // Every record below this position is known to be executed by such a device; 0 on others.
  Word<uint64_t> completed;
  // Futex word: counts all events of the worker for which a client may wait.
  alignas(kLine) Word<uint32_t> bell;
  // Rest: how the worker sleeps on ClientPage::head or ::answer_taken.
  Word<uint32_t> asleep;
  Word<uint32_t> gate_open;
  Word<uint64_t> epoch;  // number of the session's current worker; the first is 1
  // The answer to the request that ends at answer_position; bytes lie in the ring modulo its size.
  alignas(kLine) Word<uint64_t> answer_position;
  Word<uint32_t> answer_status;  // AnswerStatus
  Word<uint64_t> answer_bytes;
  Word<uint64_t> answer_produced;
  alignas(kLine) Word<uint64_t> busy_ns;  // time of the device, this session in total
  Word<uint64_t> active_ns;               // CLOCK_MONOTONIC when it last stopped executing
  Word<uint64_t> memory_resident;         // device bytes that the worker holds for storages
  // Set when a worker opens: position up to which earlier workers had executed. Records below it
  // are replayed; they ran within the grant of their time, so the current grant does not apply to
  // them.
  Word<uint64_t> furthest;
  alignas(kLine) Word<uint64_t> stalled_ns;  // total time without execution due to snapshots
  Word<uint64_t> dirty_bytes;                // of live storages, changed since the newest snapshot
  Word<uint64_t> loading_bytes;              // of live storages, not loaded yet
  // Counts answers that were begun again: Note [Restarted answers] in native/worker/loop/answers.h.
  Word<uint64_t> answer_generation;
  // See Note [Exactness] in native/worker/state/exactness.h. Times are of CLOCK_MONOTONIC, 0: none.
  Word<uint64_t> frozen;  // position of the newest snapshot, which may not be kept
  Word<uint64_t> answered_ns;
  Word<uint64_t> inexact_ns;
  Word<uint64_t> older_answered_ns;
  Word<uint64_t> older_inexact_ns;
  Word<uint64_t> recovered_ns;
  Word<uint64_t> diverged;      // requests that gave another result when they were executed again
  Word<uint64_t> device_model;  // of the worker's device; 0: no worker yet
  // See Note [Memory failures] in native/worker/state/memory_failures.h: their number, the position
  // up to which some are not listed, and the positions of the records.
  alignas(kLine) Word<uint64_t> memory_failures;
  Word<uint64_t> memory_unlisted;
  Word<uint64_t> memory_failed[kMemoryFailuresMax];
};

struct AgentPage {
  uint64_t magic;
  uint32_t version;
  uint32_t device_kind;  // DeviceKind
  // Futex word: counts every change of this page.
  alignas(kLine) Word<uint32_t> bell;
  Word<uint32_t> presence;  // Presence
  // Records below this position are in a complete snapshot; their bytes may be overwritten.
  Word<uint64_t> retained;
  Word<uint64_t> log_budget;  // bytes since `retained` at which a snapshot should begin
  // Device bytes that the session may use; the answer to ClientPage::want_sequence.
  alignas(kLine) Word<uint64_t> memory_granted;
  Word<uint64_t> grant_sequence;
  Word<uint64_t> memory_total;  // of the device, as far as the session may use it
  Word<uint64_t> memory_free;   // of the device, as last measured
  Word<uint32_t> threads;       // compute threads of a software device
  Word<uint32_t> snapshots;     // taken so far
  // For a GPU: compute capability, as 100 times its major number plus its minor one;
  // multiprocessors.
  Word<uint32_t> capability;
  Word<uint32_t> processors;
  Word<uint64_t> refused_sequence;  // newest memory request that was refused
  // Device memory that a policy allows the session's user, if that is less than the device has;
  // memory_total is then at most that. 0: no such limit.
  Word<uint64_t> memory_quota;
  alignas(kLine) char device_name[64];
  char reason[256];  // zero-terminated UTF-8, user-facing
  // 1: the worker uses deterministic algorithms, whatever the program has set.
  alignas(kLine) Word<uint32_t> deterministic;
};

// A napping worker wakes by itself soon; only for a request is that too late (Note [Naps]).
enum class Rest : uint32_t { awake = 0, asleep = 1, napping = 2 };
enum class DeviceKind : uint32_t { software = 0, cuda = 1 };
enum class AnswerStatus : uint32_t { ok = 0, error = 1 };

static_assert(sizeof(ClientPage) <= kPageBytes && sizeof(WorkerPage) <= kPageBytes &&
              sizeof(AgentPage) <= kPageBytes);
// kernelproxy/common/shared_memory.py reads and writes these words by offset; docs/format.md lists
// them.
static_assert(
    offsetof(ClientPage, head) == 64 && offsetof(ClientPage, sleepers) == 128 &&
    offsetof(ClientPage, answer_wanted) == 136 && offsetof(ClientPage, answer_taken) == 144 &&
    offsetof(ClientPage, progress_wanted) == 152 && offsetof(ClientPage, memory_used) == 192 &&
    offsetof(ClientPage, memory_peak) == 200 && offsetof(ClientPage, memory_wanted) == 208 &&
    offsetof(ClientPage, want_sequence) == 216 && offsetof(ClientPage, operators) == 224 &&
    offsetof(ClientPage, cells_running) == 256 && offsetof(ClientPage, cell_changed_ns) == 264 &&
    offsetof(ClientPage, cells_ended) == 272 && offsetof(ClientPage, answer_generation) == 280 &&
    offsetof(ClientPage, awaiting_peers) == 288);
static_assert(
    offsetof(WorkerPage, consumed) == 64 && offsetof(WorkerPage, completed) == 72 &&
    offsetof(WorkerPage, bell) == 128 && offsetof(WorkerPage, asleep) == 132 &&
    offsetof(WorkerPage, gate_open) == 136 && offsetof(WorkerPage, epoch) == 144 &&
    offsetof(WorkerPage, answer_position) == 192 && offsetof(WorkerPage, answer_status) == 200 &&
    offsetof(WorkerPage, answer_bytes) == 208 && offsetof(WorkerPage, answer_produced) == 216 &&
    offsetof(WorkerPage, busy_ns) == 256 && offsetof(WorkerPage, active_ns) == 264 &&
    offsetof(WorkerPage, memory_resident) == 272 && offsetof(WorkerPage, furthest) == 280 &&
    offsetof(WorkerPage, stalled_ns) == 320 && offsetof(WorkerPage, dirty_bytes) == 328 &&
    offsetof(WorkerPage, loading_bytes) == 336 && offsetof(WorkerPage, answer_generation) == 344 &&
    offsetof(WorkerPage, frozen) == 352 && offsetof(WorkerPage, answered_ns) == 360 &&
    offsetof(WorkerPage, inexact_ns) == 368 && offsetof(WorkerPage, older_answered_ns) == 376 &&
    offsetof(WorkerPage, older_inexact_ns) == 384 && offsetof(WorkerPage, recovered_ns) == 392 &&
    offsetof(WorkerPage, diverged) == 400 && offsetof(WorkerPage, device_model) == 408 &&
    offsetof(WorkerPage, memory_failures) == 448 && offsetof(WorkerPage, memory_unlisted) == 456 &&
    offsetof(WorkerPage, memory_failed) == 464);
static_assert(offsetof(AgentPage, device_kind) == 12 && offsetof(AgentPage, bell) == 64 &&
              offsetof(AgentPage, presence) == 68 && offsetof(AgentPage, retained) == 72 &&
              offsetof(AgentPage, log_budget) == 80 && offsetof(AgentPage, memory_granted) == 128 &&
              offsetof(AgentPage, grant_sequence) == 136 &&
              offsetof(AgentPage, memory_total) == 144 && offsetof(AgentPage, memory_free) == 152 &&
              offsetof(AgentPage, threads) == 160 && offsetof(AgentPage, snapshots) == 164 &&
              offsetof(AgentPage, capability) == 168 && offsetof(AgentPage, processors) == 172 &&
              offsetof(AgentPage, refused_sequence) == 176 &&
              offsetof(AgentPage, memory_quota) == 184 && offsetof(AgentPage, device_name) == 192 &&
              offsetof(AgentPage, reason) == 256 && offsetof(AgentPage, deterministic) == 512);

}  // namespace sing
