"""Processes that the ranks of a job share: what ends alone, and what ends with all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kernelproxy.agent.workers import seat
from kernelproxy.agent.workers.seats import SeatKey, Seats
from kernelproxy.agent.workers.watchdog import Watchdog
from kernelproxy.agent.workers.worker import Worker
from kernelproxy.common.errors import WorkerDiedError, WorkerError
from kernelproxy.common.ipc.channel import Channel, close_fds
from kernelproxy.common.protocol import Done, End, Ended, Error, Gate, Host, Open, Opened

SECONDS = 20.0
ORDER = Open(session="s", device="cpu", threads=1, epoch=1, skip=[], snapshot=False, gate=True)


class ServedProcess:
    """A real process without work, of which this one serves the connections."""

    def __init__(self, control: socket.socket) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.sessions: list[Channel] = []
        self.refuses = self.deaf = False
        self._serving: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(self.pidfd, self._note_end)
        self.serve(control)

    def serve(self, control: socket.socket) -> None:
        """Begin to serve a connection."""
        channel = Channel(control)
        self.sessions.append(channel)
        self._serving.add(asyncio.create_task(self._serve(channel)))

    async def _serve(self, channel: Channel) -> None:
        try:
            while True:
                order, fds = await channel.receive()
                if isinstance(order, Host):
                    self.serve(socket.socket(fileno=fds.pop()))
                elif isinstance(order, Open) and self.refuses:
                    await channel.send(Error("no", "failed"))
                    break
                elif isinstance(order, Open):
                    await channel.send(Opened())
                elif isinstance(order, Gate) and not self.deaf:
                    await channel.send(Done())
                elif isinstance(order, End) and not self.deaf:
                    break
                close_fds(fds)
        except OSError:
            pass
        self.end_session(channel)

    def die(self) -> None:
        """End the process, and its connections with it, before the event loop notices."""
        self.process.kill()
        self.process.wait()
        for each in self.sessions:
            each.close()

    def end_session(self, channel: Channel) -> None:
        """End a session, or the process with the last one."""
        if channel in self.sessions:
            self.sessions.remove(channel)
            if self.sessions:
                channel.close()
            else:
                self.sessions.append(channel)
                self.process.kill()

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)
        os.close(self.pidfd)
        self.ended.set_result(self.process.wait())
        assert self.process.stdin is not None
        self.process.stdin.close()
        for each in self.sessions:
            each.close()
        for task in self._serving:
            task.cancel()


class RankZygote:
    """Forks such processes."""

    dead = False

    def __init__(self) -> None:
        self.forked: list[ServedProcess] = []
        self.ready = asyncio.Event()
        self.ready.set()

    async def spawn(self, on_change: Callable[[], object]) -> Worker:
        """See `Zygote`."""
        await self.ready.wait()
        ours, theirs = socket.socketpair()
        process = ServedProcess(theirs)
        self.forked.append(process)
        pidfd = os.dup(process.pidfd)
        return Worker(Channel(ours), process.process.pid, pidfd, process.ended, on_change)


class SeatedJob:
    """Ranks of one job on one device."""

    def __init__(self) -> None:
        self.zygote, self.seats, self.changes = RankZygote(), Seats(), 0
        self.key = SeatKey(7, "job", "cpu:0", self.zygote)
        self.workers: list[Worker] = []

    def changed(self) -> None:
        self.changes += 1

    async def spawn(self, key: SeatKey | None = None) -> Worker:
        worker = await self.seats.spawn(key or self.key, self.changed)
        self.workers.append(worker)
        return worker

    async def rank(self) -> Worker:
        """Start a rank."""
        worker = await self.spawn()
        await worker.open(ORDER, [], SECONDS)
        return worker

    async def ranks(self, count: int) -> list[Worker]:
        return [await self.rank() for _ in range(count)]

    def crash(self) -> None:
        """End the process as by a fault of its own."""
        self.zygote.forked[-1].die()


@asynccontextmanager
async def job() -> AsyncIterator[SeatedJob]:
    """Make a job, end it, and check that it leaves nothing."""
    before = len(os.listdir("/proc/self/fd"))
    made = SeatedJob()
    try:
        yield made
    finally:
        for worker in made.workers:
            worker.close()
            worker.close()
        for process in made.zygote.forked:
            await process.ended
        await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(made.seats) == 0


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await scenario()

    asyncio.run(bounded())


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "FALL_SECONDS", 0.2)


async def works(worker: Worker) -> bool:
    """Return True if a worker carries out commands."""
    await worker.gate(True, SECONDS)
    return not worker.broken


def lives(process: ServedProcess) -> bool:
    return process.process.poll() is None


def test_ranks_of_a_job_on_a_device_share_a_process() -> None:
    async def scenario() -> None:
        async with job() as made:
            first, second, third = await made.ranks(3)
            assert len({first.pid, second.pid, third.pid}) == 1
            assert len({first.pidfd, second.pidfd, third.pidfd}) == 3
            assert all([await works(each) for each in (first, second, third)])
            assert len(made.zygote.forked) == len(made.seats) == 1

    play(scenario)


def test_ranks_of_another_user_job_device_or_environment_have_another_process() -> None:
    async def scenario() -> None:
        async with job() as made:
            await made.rank()
            other = RankZygote()
            keys = [
                SeatKey(8, "job", "cpu:0", made.zygote),
                SeatKey(7, "jab", "cpu:0", made.zygote),
                SeatKey(7, "job", "cpu:1", made.zygote),
                SeatKey(7, "job", "cpu:0", other),
            ]
            found = [await made.spawn(key) for key in keys]
            assert len({each.pid for each in (*found, *made.workers)}) == 5
            made.zygote.forked += other.forked

    play(scenario)


def test_ranks_that_start_at_once_share_a_process_once_the_first_is_open() -> None:
    async def scenario() -> None:
        async with job() as made:
            made.zygote.ready.clear()
            starting = [asyncio.create_task(made.rank()) for _ in range(4)]
            await asyncio.sleep(0)
            made.zygote.ready.set()
            await asyncio.gather(*starting)
            assert len(made.zygote.forked) == 1
            assert len(made.zygote.forked[0].sessions) == 4

    play(scenario)


def test_a_rank_does_not_wait_for_one_that_cannot_start() -> None:
    async def scenario() -> None:
        async with job() as made:
            first = await made.spawn()
            made.zygote.forked[0].refuses = True
            second = asyncio.create_task(made.rank())
            await asyncio.sleep(0)
            with pytest.raises(WorkerError, match="no"):
                await first.open(ORDER, [], SECONDS)
            await first.stop()
            first.close()
            assert (await second).pid == made.zygote.forked[1].process.pid

    play(scenario)


def test_ranks_do_not_wait_for_a_fork_that_fails() -> None:
    async def scenario() -> None:
        async with job() as made:
            made.zygote.ready.clear()
            first = asyncio.create_task(made.rank())
            await asyncio.sleep(0)
            second = asyncio.create_task(made.rank())
            await asyncio.sleep(0)
            first.cancel()
            made.zygote.ready.set()
            assert await works(await second)

    play(scenario)


@pytest.mark.parametrize("number", [0, 1])
def test_the_end_of_one_rank_leaves_the_others(number: int) -> None:
    async def scenario() -> None:
        async with job() as made:
            ranks = await made.ranks(2)
            ended, other = ranks[number], ranks[1 - number]
            await ended.end(SECONDS)
            assert ended.exited.is_set()
            assert await ended.status() is None
            ended.close()
            assert await works(other)
            third = await made.rank()
            assert third.pid == other.pid
            await third.stop()
            assert await works(other)
            await other.end(SECONDS)
            assert not lives(made.zygote.forked[0])
            assert await other.status() == -signal.SIGKILL

    play(scenario)


def test_closing_a_rank_that_works_leaves_the_others() -> None:
    async def scenario() -> None:
        async with job() as made:
            first, second = await made.ranks(2)
            first.close()
            assert await works(second)
            second.close()
            await made.zygote.forked[0].ended

    play(scenario)


def test_a_process_that_none_needs_is_killed_at_once() -> None:
    async def scenario() -> None:
        async with job() as made:
            ranks = await made.ranks(3)
            made.zygote.forked[0].deaf = True
            await asyncio.gather(*(each.stop() for each in ranks))
            assert not lives(made.zygote.forked[0])

    play(scenario)


def test_a_crash_ends_all_ranks_and_each_may_be_to_blame() -> None:
    async def scenario() -> None:
        async with job() as made:
            ranks = await made.ranks(3)
            waiting = asyncio.create_task(ranks[0].last_words())
            made.crash()
            assert await waiting is None
            for each in ranks:
                await each.exited.wait()
                assert (await each.fell_with_others(), each.suspect) == (True, True)
                assert (each.overdue, each.broken) == (False, True)
            assert made.changes >= 3
            again = await made.rank()
            assert again.pid != ranks[0].pid

    play(scenario)


def test_a_rank_that_is_killed_is_to_blame_for_the_end_of_the_others() -> None:
    async def scenario() -> None:
        async with job() as made:
            first, second = await made.ranks(2)
            await first.kill()
            await second.exited.wait()
            assert [await each.fell_with_others() for each in (first, second)] == [True, True]
            assert (first.suspect, second.suspect) == (True, False)

    play(scenario)


def test_a_rank_that_takes_too_long_ends_the_process() -> None:
    async def scenario() -> None:
        async with job() as made:
            first, second = await made.ranks(2)
            made.zygote.forked[0].deaf = True
            with pytest.raises(WorkerError, match="took too long"):
                await first.gate(True, 0.05)
            await second.exited.wait()
            assert (first.overdue, second.overdue) == (True, False)
            assert (first.suspect, second.suspect) == (True, False)

    play(scenario)


def test_a_rank_whose_command_is_cancelled_ends_alone() -> None:
    async def scenario() -> None:
        async with job() as made:
            first, second = await made.ranks(2)
            made.zygote.forked[0].deaf = True
            ordered = asyncio.create_task(first.gate(True, SECONDS))
            await asyncio.sleep(0)
            ordered.cancel()
            await asyncio.wait({ordered})
            await first.exited.wait()
            made.zygote.forked[0].deaf = False
            assert await works(second)
            assert not await first.fell_with_others()

    play(scenario)


@pytest.mark.parametrize("said", [None, Ended("position 8: a bad record")])
def test_a_session_that_ends_by_itself_ends_alone(said: Ended | None) -> None:
    async def scenario() -> None:
        async with job() as made:
            first, second = await made.ranks(2)
            process = made.zygote.forked[0]
            channel = process.sessions[0]
            if said is not None:
                await channel.send(said)
            process.end_session(channel)
            assert await first.last_words() == (said.message if said else None)
            assert not await first.fell_with_others()
            assert await first.status() is None
            first.close()
            assert await works(second)

    play(scenario)


def test_a_process_that_dies_before_a_session_is_open_is_replaced() -> None:
    async def scenario() -> None:
        async with job() as made:
            first = await made.rank()
            second = await made.spawn()
            made.crash()
            with pytest.raises(WorkerDiedError):
                await second.open(ORDER, [], SECONDS)
            assert await second.fell_with_others()
            await second.stop()
            second.close()
            third = await made.rank()
            assert third.pid != first.pid
            assert await works(third)

    play(scenario)


def test_ranks_that_wait_for_a_process_which_dies_get_another_one() -> None:
    async def scenario() -> None:
        async with job() as made:
            first = await made.spawn()
            waiting = [asyncio.create_task(made.rank()) for _ in range(3)]
            await asyncio.sleep(0)
            made.crash()
            await first.exited.wait()
            assert len({(await each).pid for each in waiting}) == 1
            assert len(made.zygote.forked) == 2

    play(scenario)


def test_a_process_that_has_died_unnoticed_is_not_joined() -> None:
    async def scenario() -> None:
        async with job() as made:
            await made.rank()
            made.crash()
            assert await works(await made.rank())
            assert len(made.zygote.forked) == 2

    play(scenario)


def test_a_process_is_not_killed_for_one_rank_if_another_must_not_be_lost() -> None:
    async def scenario() -> None:
        async with job() as made:
            first, second = await made.ranks(2)
            for each in (first, second):
                each.watchdog = Watchdog(0.02, 1.0)
            second.watchdog.endless = lambda: True
            with first.waiters_present():
                await asyncio.sleep(0.2)
                assert not first.broken
                second.watchdog.endless = lambda: False
                await first.exited.wait()
            assert "did nothing" in first.hung
            assert (first.suspect, second.suspect, second.hung) == (True, False, "")

    play(scenario)


def test_without_descriptors_a_rank_gets_an_error_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with job() as made:
            first = await made.rank()

            def none(*_: object) -> None:
                raise OSError(24, "Too many open files")

            for owner, name in ((socket, "socketpair"), (os, "dup")):
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, none)
                    with pytest.raises(WorkerError, match="Too many open files"):
                        await made.spawn()
            assert await works(first)
            assert len(made.zygote.forked) == 1

    play(scenario)


def test_a_worker_without_a_seat_is_killed_with_its_connection() -> None:
    async def scenario() -> None:
        async with job() as made:
            alone = await made.zygote.spawn(made.changed)
            made.workers.append(alone)
            await alone.open(ORDER, [], SECONDS)
            made.zygote.forked[0].sessions[0].end()
            await alone.exited.wait()
            assert not lives(made.zygote.forked[0])
            assert not await alone.fell_with_others()
            assert await alone.status() == -signal.SIGKILL

    play(scenario)
