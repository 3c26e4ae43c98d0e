// C interface of libsing_worker, called by kernelproxy/worker.py through ctypes.
//
// The main thread of a worker calls run(), which executes the log until it is told to end; another
// (Python) thread gives the orders. Functions return 0, or a negative number with the text in
// sing_worker_error().
#pragma once

#include <stdint.h>

extern "C" {

// Maps a session. `snapshot_fd` is -1, or a snapshot to start from; descriptors stay the caller's.
// `device` is "cpu" or "cuda:N"; `threads` counts compute threads of a software device (0: leave).
// `skip` lists positions of calls that killed earlier workers: they are reported as errors.
int sing_worker_open(int log_fd, int client_fd, int worker_fd, int agent_fd, int snapshot_fd,
                     const char* device, int threads, uint64_t epoch, const uint64_t* skip,
                     int skip_count);

// Executes until sing_worker_end() or a corrupt record. Returns 0 after an end; 1 if the log is
// corrupt (text and position in sing_worker_error()).
int sing_worker_run();

// Orders, from any thread. They take effect between two operators.
void sing_worker_gate(int open);
void sing_worker_end();

// Writes all storages, generators and tables at the present position into a memfd, closing the
// gate meanwhile; returns when it is done. The position is stored, the descriptor returned.
// Works before run(), during run() (from another thread), and with a closed gate.
int sing_worker_snapshot(uint64_t* position, uint64_t* bytes);

const char* sing_worker_error();
}
