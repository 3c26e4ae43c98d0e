"""Compute threads on the host while a collective is executed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kernelproxy.kernel.collectives import host_threads
from kernelproxy.kernel.collectives.host_threads import one_thread


def helpers() -> int:
    """Return how many threads this process has after a large sum."""
    torch.ones(1 << 20).add_(1)
    return len(list(Path("/proc/self/task").iterdir()))


def test_operators_get_no_helper_threads_and_only_in_the_context() -> None:
    found: list[int] = []

    def work() -> None:
        begun = len(list(Path("/proc/self/task").iterdir()))
        with one_thread():
            assert torch.get_num_threads() == 1
            found.append(helpers() - begun)
        assert torch.get_num_threads() == 2
        found.append(helpers() - begun)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert found == [0, 1]


def test_another_openmp_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_threads, "_set_threads", None)
    threads = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == threads
