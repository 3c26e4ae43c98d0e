// sing-sandbox: runs a process, and all processes it starts, with pids and a /proc of their own.
//
// Pids cannot be chosen where other processes use them, and a process is restored with the pids
// that it had. So kernels run in a sandbox, and so do the programs that save and restore them:
//
//   launcher            waits outside; ends the sandbox when its lifeline ends
//   └── first process   pid 1 inside: reaps
//       └── main        the kernel: started, or restored by a command
#include "sandbox/enter.h"
#include "sandbox/options.h"
#include "sandbox/outside.h"

int main(int count, char** arguments) {
  using namespace sing::sandbox;
  const Options options = parse(count, arguments);
  return options.mode == Mode::kEnter ? run_entered(options) : run_outside(options);
}
