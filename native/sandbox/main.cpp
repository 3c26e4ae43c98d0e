// sing-sandbox: a process, and all that it starts, with numbers and a /proc of their own.
//
// Numbers of processes cannot be chosen where others use them, and a process is restored with the
// numbers that it had. So kernels run like this, and so does whatever saves and restores them:
//
//   launcher            waits outside; ends the sandbox when whoever wanted it ends
//   └── first process   number 1 inside: reaps
//       └── main        the kernel: started, or restored by a command
#include "sandbox/enter.h"
#include "sandbox/options.h"
#include "sandbox/outside.h"

int main(int count, char** arguments) {
  using namespace sing::sandbox;
  const Options options = parse(count, arguments);
  return options.mode == Mode::kEnter ? run_entered(options) : run_outside(options);
}
