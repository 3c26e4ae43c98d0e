"""Sessions that hold weights: the cost of uploading, saving and spilling; how they are resumed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernelproxy.common.protocol import Resume, Suspend
from kernelproxy.common.protocol.views import SessionView
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.e2e.trainers import (
    WEIGHTS,
    Program,
    program,
    session_of,
    status,
    verb,
)
from tests.integration.conftest import lives

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MIB = 1 << 20
#: State of an inference session: size of a matrix, and number of matrices.
MATRIX_BYTES, MATRICES = 16 * MIB, 6
STATE_BYTES = MATRIX_BYTES * MATRICES
DISK_SECONDS = 120.0


@contextmanager
def weights(seed: int = 0) -> Iterator[Program]:
    with program(seed, proxied=True, path=WEIGHTS) as started:
        assert started.answer() == ["ready"]
        yield started


def inference(started: Program) -> None:
    assert started.do(f"load {MATRICES} {MATRIX_BYTES}") == "there"
    started.do("infer 3")


@pytest.fixture(autouse=True)
def data_dir(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> Path:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:2GiB@1,cpu:2GiB@1")
    monkeypatch.setenv("JUPYTER_SING_HOST_MEMORY", "16GiB")  # whatever this machine has
    return runtime_dir / "data"


# -------------------------------------------------------------------- uploading


@pytest.mark.parametrize(
    ("count", "each"), [(64, 16 * MIB), (1, 1024 * MIB)], ids=["many tensors", "one tensor"]
)
def test_an_upload_of_a_gibibyte_is_recoverable_at_every_moment(
    count: int, each: int, runtime_dir: Path
) -> None:
    done = threading.Event()
    seen: list[SessionView] = []

    def watch() -> None:
        while not done.wait(0.02):
            seen.extend(status().sessions)

    with weights() as started:
        started.do("alone")
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            assert started.do(f"fill {count} {each}") == "there"
        finally:
            done.set()
            watcher.join()
        assert seen
        assert [found["reason"] for found in seen if not found["recoverable"]] == []
        assert "freed without a snapshot" not in (runtime_dir / "agent.log").read_text()
        worker = existing(session_of(started)["worker_pid"])
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not lives(worker))
        assert float.fromhex(started.do("sum")) == count * each / 4


# -------------------------------------------------------------------- saving again


def test_the_second_snapshot_of_an_inference_session_copies_next_to_nothing() -> None:
    with weights() as started:
        inference(started)
        first = verb(Suspend(started.session))["snapshot"]
        assert first is not None
        assert STATE_BYTES <= first["bytes"] < 1.01 * STATE_BYTES
        verb(Resume(started.session))
        answer = started.do("infer 3")
        second = verb(Suspend(started.session))["snapshot"]
        assert second is not None
        assert second["position"] > first["position"]
        assert second["copied"] < 0.01 * first["bytes"]
        verb(Resume(started.session))
        assert started.do("infer 3") == answer


# -------------------------------------------------------------------- on disk


@pytest.fixture
def soon_cold(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> Path:
    """Let suspended state be spilled at once; return the directory of the store."""
    monkeypatch.setenv("JUPYTER_SING_COLD_AFTER", "0.001")
    return data_dir / "states"


def go_cold(started: Program) -> None:
    verb(Suspend(started.session))
    wait_until(lambda: session_of(started)["tier"] == "cold", DISK_SECONDS)


def chunks(store: Path) -> dict[str, int]:
    """Return the chunks of a store, by name, with their size on disk."""
    found = {}
    for each in store.glob("chunks/*/*"):
        with contextlib.suppress(FileNotFoundError):  # it was just collected
            found[each.name] = each.stat().st_size
    return found


def test_unchanged_weights_are_not_written_to_disk_again(soon_cold: Path) -> None:
    with weights() as started:
        inference(started)
        go_cold(started)
        before = chunks(soon_cold)
        assert STATE_BYTES * 0.9 < sum(before.values()) < 1.02 * STATE_BYTES
        verb(Resume(started.session))
        answer = started.do("infer 3")
        go_cold(started)
        after = chunks(soon_cold)
        new = sum(count for name, count in after.items() if name not in before)
        assert new < 0.01 * STATE_BYTES
        verb(Resume(started.session))
        assert started.do("infer 3") == answer


def test_the_same_weights_of_two_sessions_are_stored_once(soon_cold: Path) -> None:
    with weights(7) as one:
        inference(one)
        with weights(7) as other:
            inference(other)
            digest = one.do("digest")
            assert other.do("digest") == digest
            go_cold(one)
            alone = sum(chunks(soon_cold).values())
            assert alone > 0.9 * STATE_BYTES
            go_cold(other)
            assert sum(chunks(soon_cold).values()) < 1.02 * alone
            for each in (one, other):
                verb(Resume(each.session))
                assert each.do("digest") == digest
            go_cold(one)
        wait_until(lambda: len(list(soon_cold.glob("manifests/*/*.json"))) == 1)
        verb(Resume(one.session))  # all chunks that the other session has left are there
        assert one.do("digest") == digest
    wait_until(lambda: not chunks(soon_cold))


def test_a_session_executes_before_anything_came_back_from_disk(soon_cold: Path) -> None:
    with weights() as started:
        inference(started)
        digest = started.do("digest")
        go_cold(started)
        with open(soon_cold / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # now no process can read from the store
            found = verb(Resume(started.session))
            assert found["tier"] == "resident"
            assert float.fromhex(started.do("alone")) == 3.0
            assert session_of(started)["loading"] >= STATE_BYTES
        assert started.do("digest") == digest
        wait_until(lambda: session_of(started)["loading"] == 0)
