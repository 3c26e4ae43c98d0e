"""Fixtures of the tests with a CUDA build of torch: two cards, and notebooks on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.native import build as native
from tests.conftest import ROOT, daemon_directory
from tests.doubles.cuda.build import build, build_operators
from tests.doubles.cuda.cards import Cards
from tests.e2e.kernels import Kernel, kernel

GIB = 1 << 30
HAS_CUDA = (native.describe().directory / "lib" / "libtorch_cuda.so").exists()


def pytest_ignore_collect() -> bool | None:
    """Leave these tests out where torch was built without CUDA: see `make test-cuda`."""
    return None if HAS_CUDA else True


@pytest.fixture(scope="session")
def double() -> Path:
    """The runtime of the double, built once."""
    return build(ROOT / "build" / "cuda-double")


@pytest.fixture
def operators(double: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cards compute what torch's operators compute, not only the kernels they know."""
    monkeypatch.setenv("CUDA_DOUBLE_OPERATORS", str(build_operators(double.parent)))


@pytest.fixture
def cards(double: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    """Two cards of 4 GiB, which a daemon of this test alone will find."""
    found = Cards(tmp_path / "cards", double, [4 * GIB, 4 * GIB], 400 << 20)
    with daemon_directory(tmp_path / "runtime", monkeypatch):
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("JUPYTER_SING_DEVICES", "auto")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield found


@pytest.fixture
def notebook(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """A notebook whose kernel has a session."""
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    with kernel() as started:
        yield started
