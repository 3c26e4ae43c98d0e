// C interface of libsing_worker, called by kernelproxy/worker/library.py through ctypes.
//
// A thread of a worker calls run(), which executes a session's log until it is ordered to end;
// another (Python) thread gives the orders. A process executes one session, or it is a seat, see
// Note [Turns] in seat.h: then its main thread calls serve(), and each session has a thread that
// calls run(). Functions return 0, or a negative number with the text in sing_worker_error().
#pragma once

#include <stdint.h>

extern "C" {

// The caller keeps ownership of the descriptors.
struct sing_worker_files {
  int log, client, worker, agent, arena;
  int snapshot;   // to start from; -1: none
  int readiness;  // of the snapshot's extents; -1: all are in the arena
  int contents;   // of the snapshot's storages, if it comes from another process of the job; or -1
  int carried;    // then: their bytes
  int base;       // then: the snapshot from which a recovery starts; -1: the start of the log
};

// A record that ended earlier workers, and is reported as an error instead.
struct sing_worker_skip {
  uint64_t position;
  const char* why;  // the text of the error
  int starved;      // it is lack of host memory
};

// Before sing_worker_open(), in the same thread: makes the context on the device.
int sing_worker_warm(const char* device);

// Makes this process a seat, before the first session is opened. `key`: of its job, as many random
// bytes as sing_worker_key_bytes() says.
int sing_worker_seat(int threads, const void* key, uint64_t key_bytes);
uint64_t sing_worker_key_bytes();
// Returns the descriptor of a list of the contents that the seat's sessions hold. None of them ends
// before this thread has opened a session, or ends.
int sing_worker_list_contents();
// Executes the records of all sessions until end_seat().
int sing_worker_serve(int threads);
void sing_worker_end_seat();

// See Seat::Switches and Replicas::Figures.
struct sing_worker_seat_counts {
  uint64_t switches, switch_ns;
  uint64_t executed, squashed, recomputed;  // calls
  uint64_t held_max;                        // bytes
};
void sing_worker_seat_figures(struct sing_worker_seat_counts* counts);

// Maps a session and returns its number. `device` is "cpu" or "cuda:N"; `threads` is the number of
// compute threads of a software device (0: unchanged). Below `careful_until`, the device executes
// one record at a time. `prepare`: load all of the snapshot, and do not touch the worker's page
// before the gate is opened.
int sing_worker_open(const struct sing_worker_files* files, const char* device, int threads,
                     uint64_t epoch, const struct sing_worker_skip* skip, int skip_count,
                     uint64_t careful_until, int prepare);

// Called by the thread that executes when the device has no memory for an operator. It makes other
// workers give back what they keep, and returns when they have. For the sessions that this thread
// opens afterwards.
void sing_worker_on_no_room(void (*ask)(void));

// Executes until sing_worker_end() or a corrupt record. Returns 0 after an end; 1 if the log is
// corrupt (text and position in sing_worker_error()); SING_WORKER_NO_ROOM if the device has no
// memory to execute the log again.
int sing_worker_run(int session);
enum { SING_WORKER_NO_ROOM = -3 };

// What each function returns if the device rejects all further work of this process, which has to
// end then. sing_worker_error() is the device's text.
enum { SING_WORKER_LOST = -2 };

struct sing_worker_loss {
  int code;               // of the error; 0: unknown
  uint64_t position;      // of the record during which it was noticed
  const char* operation;  // of that record; "": none
};

// The loss that the last function called in this thread has returned.
void sing_worker_lost(struct sing_worker_loss* loss);

// Orders, from any thread. They take effect between two operators.
int sing_worker_gate(int session, int open);
// Gives or takes the lease: without it nothing is executed except a replay. A stale token is
// ignored.
int sing_worker_lease(int session, uint64_t token, int given);
// Takes the lease where the program's memory use is lowest if that point is reached within
// `within_ns`, otherwise at the end of that time. Returns when the lease is taken.
int sing_worker_take_lease(int session, uint64_t token, uint64_t within_ns);
// Returns when nothing is executed, or when a lease was given again.
int sing_worker_await_parked(int session);
// Gives back the device memory that is kept for the next tensors; from any thread, at any time.
// `kept`: bytes that could not be given back, as they are parts of blocks that are in use.
int sing_worker_give_back_cache(int session, uint64_t* kept);
void sing_worker_end(int session);

// Frees what the session has in this process, after run() has returned.
void sing_worker_close(int session);

struct sing_worker_taken {
  uint64_t position;
  uint64_t bytes;       // of the state in the snapshot
  uint64_t copied;      // of those, changed since the last snapshot
  uint64_t stalled_ns;  // for which the log was not executed
  uint64_t duration_ns;
};

// Takes a snapshot of the current position and returns the descriptor of its tables when it is
// done. `manner`: 0 nothing is executed meanwhile; 1 execution continues; 2 execution continues,
// and the snapshot begins when it disturbs least. `frozen`, if not null, is called when the
// snapshot's contents can no longer change, which is long before they are copied. Works before
// run(), during run() (from another thread), and with a closed gate. Only one at a time, and not
// together with trim() or adopt().
int sing_worker_snapshot(int session, int manner, void (*frozen)(void),
                         struct sing_worker_taken* taken);

struct sing_worker_departed {
  uint64_t copied;                // bytes in `carried`
  uint64_t omitted;               // storages that the target has
  int tables, contents, carried;  // descriptors
};

// Saves what a session takes along to a process of its job, like a snapshot during which nothing is
// executed. `known`: descriptor of what the process has. See Note [Moves] in moved.h.
int sing_worker_depart(int session, int known, struct sing_worker_departed* into);
// Makes a snapshot in progress use all resources that it can get.
void sing_worker_hurry(int session);
// Ends a patient snapshot in progress, which then fails; hurries another one.
void sing_worker_drop(int session);
// Frees the memory of snapshots before AgentPage::retained.
int sing_worker_trim(int session);
// Takes the memory that the next snapshot or move needs; execution continues. Ends early at
// sing_worker_hurry(). Not together with the functions above.
int sing_worker_preallocate(int session);
// Opens the gate and returns when everything below `until` was executed.
int sing_worker_replay(int session, uint64_t until);
// For a prepared worker: adopts a newer snapshot of its session.
int sing_worker_adopt(int session, int snapshot);

struct sing_worker_step {
  uint64_t records;  // 0: nothing repeats
  uint64_t nadir;    // in [0, records): the one after which least memory is in use
  uint64_t memory_min, memory_max;
  uint64_t made, ns;  // records since then, and their time
};

// The step that the log repeats, and the records since a time of the monotonic clock.
int sing_worker_observe(int session, uint64_t since_ns, struct sing_worker_step* step);

const char* sing_worker_error();
}
