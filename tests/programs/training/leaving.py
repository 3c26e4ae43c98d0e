"""Train in two threads and write the losses, in hexadecimal: they are compared bit for bit.

With ``--leave`` the main thread detaches from the device session between its steps and reattaches,
whatever the other thread does; and a wait of a thread that needs the device meanwhile is
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path

from kernelproxy.kernel.activation.native_client import NativeClient

STEPS = 10
MEMORY = 5  # the log twice, and three pages


class Leaver:
    """Detaches from a session and reattaches, as the link does, with copies of its descriptors."""

    def __init__(self) -> None:
        self._client: NativeClient | None = None
        self._fds: list[int] = []
        self._connect = NativeClient.connect

    def install(self) -> None:
        """Record which client attaches, and its arguments; before torch is imported."""
        NativeClient.connect = lambda *arguments: self._note(*arguments)  # type: ignore[method-assign]

    def _note(self, client: NativeClient, fds: list[int], bell_fd: int) -> None:
        self._connect(client, fds, bell_fd)
        self._client, self._fds = client, [*map(os.dup, fds), bell_fd]

    def leave(self) -> None:
        """Detach; nothing of the session is mapped then."""
        assert self._client is not None
        assert self._mapped() == MEMORY
        self._client.leave(60.0)
        assert self._mapped() == 0

    def rejoin(self) -> None:
        """Reattach."""
        assert self._client is not None
        self._client.rejoin(self._fds[:4], self._fds[4])
        assert self._mapped() == MEMORY

    @staticmethod
    def _mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:sing-")


def interrupt_a_wait(leaver: Leaver) -> None:
    """Interrupt a wait for reattaching; the interrupted operator must not have been executed."""
    import torch

    number = torch.zeros(1, device="cuda")
    leaver.leave()
    main = threading.main_thread().ident
    assert main is not None
    try:
        threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        number += 1
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it was not waited for")
    finally:
        leaver.rejoin()
    assert number.item() == 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--leave", action="store_true")
    options = parser.parse_args()
    leaver = Leaver()
    if options.leave:
        leaver.install()
    from benchmarks import programs

    steps = [programs.TRAINING[name](options.device, True) for name in ("mlp", "cnn")]
    losses: list[list[str]] = [[], []]

    def train(which: int) -> None:
        losses[which].append(float(steps[which]()).hex())

    def train_the_other() -> None:
        for _ in range(STEPS):
            train(1)

    other = threading.Thread(target=train_the_other)
    other.start()
    for _ in range(STEPS):
        if options.leave:
            leaver.leave()
            done = len(losses[1])
            sum(range(1_000_000))  # the other thread does not hold the GIL while it waits
            # It may have had an answer before, but cannot have made another step.
            assert len(losses[1]) <= done + 1
            leaver.rejoin()
        train(0)
    other.join()
    if options.leave:
        interrupt_a_wait(leaver)
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
