"""Join a device session and do what each line of a fifo says; answers are lines of a file.

``member.py FIFO ANSWERS SECONDS``; SECONDS: how long it waits for other threads before it detaches.

    grow COUNT    issue operators without waiting; "grown", or the number until an interrupt
    sync          wait until all are executed; "done", or the error's first line
    begin         start a thread that repeats both; "begun"
    end           end it; the number of repetitions

It is connected to no other process but by the session, and has no terminal: CRIU can save it.
"""

from __future__ import annotations

import os
import sys
import threading

from kernelproxy.kernel import activation
from kernelproxy.kernel.activation import agent_connection

ROUND = 50


class Member:
    """The program."""

    def __init__(self) -> None:
        activation.activate()
        import torch

        assert torch.cuda.is_available()
        self._torch = torch
        self._stop = threading.Event()
        self._rounds = 0
        self._thread: threading.Thread | None = None
        self._sum = torch.zeros(16, device="cuda")

    def grow(self, count: str) -> str:
        number = 0
        try:
            for number in range(int(count)):
                self._sum = self._sum + float(number)
        except KeyboardInterrupt:
            return str(number)
        return "grown"

    def sync(self) -> str:
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return "done"

    def begin(self) -> str:
        def work() -> None:
            while not self._stop.is_set():
                ones = self._torch.ones(16, device="cuda")
                for _ in range(ROUND):
                    ones = ones * 2
                self.sync()
                self._rounds += 1

        self._stop.clear()
        self._thread = threading.Thread(target=work)
        self._thread.start()
        return "begun"

    def end(self) -> str:
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        return str(self._rounds)


def main() -> None:
    fifo, answers, seconds = sys.argv[1:]
    agent_connection.LEAVE_SECONDS_MAX = float(seconds)
    member = Member()
    # Both ends, so that reading never reaches an end.
    with open(os.open(fifo, os.O_RDWR | os.O_CLOEXEC), "rb", buffering=0) as commands:
        say(answers, "ready")
        while True:
            verb, *arguments = commands.readline().decode().split()
            if verb == "exit":
                return
            say(answers, getattr(member, verb)(*arguments))


def say(answers: str, text: str) -> None:
    with open(answers, "a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    main()
