"""The double under plain torch: as strict as hardware, and never wrong in silence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import ROOT
from tests.doubles.cuda.cards import Cards

pytestmark = [pytest.mark.slow]


def run(cards: Cards, code: str, **more: str) -> str:
    """Run a program with plain torch on the cards; return what it prints, or how it ended."""
    env = {**os.environ, "CUDA_DOUBLE_LAG_US": "20000", **more}
    program = "import torch\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else f"ended with {done.returncode}"


def test_its_kernels_compute_what_the_host_computes(cards: Cards) -> None:
    program = ROOT / "tests" / "programs" / "operators" / "double_kernels.py"
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr[-2000:]) == ("done\n", "")
    assert cards.launches(0) > 400


def test_a_copy_is_not_there_before_it_was_waited_for(cards: Cards) -> None:
    code = """
        x = torch.full((4,), 7., device="cuda")
        pinned = torch.zeros(4).pin_memory()
        torch.cuda.synchronize()
        pinned.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        early, ready = pinned.tolist(), event.query()
        event.synchronize()
        print(early, ready, pinned.tolist())
    """
    assert run(cards, code) == "[0.0, 0.0, 0.0, 0.0] False [7.0, 7.0, 7.0, 7.0]"


@pytest.mark.parametrize(("wait", "seen"), [("True", "5.0"), ("False", "0.0")])
def test_streams_wait_for_each_other_only_if_told(cards: Cards, wait: str, seen: str) -> None:
    code = f"""
        import ctypes, threading
        runtime = ctypes.CDLL({cards.environment["LD_PRELOAD"]!r})
        read, wait = threading.Event(), {wait}
        work = lambda data: read.wait(0.3 if wait else None)
        work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)
        x = torch.zeros(4, device="cuda")
        pinned = torch.ones(4).pin_memory()
        torch.cuda.synchronize()
        this, other = torch.cuda.current_stream(), torch.cuda.Stream()
        with torch.cuda.stream(other):
            runtime.cudaLaunchHostFunc(ctypes.c_void_p(other.cuda_stream), work, None)
            x.fill_(5)
        if wait:
            this.wait_stream(other)
        pinned.copy_(x, non_blocking=True)
        if not wait:
            this.synchronize()
            read.set()
        torch.cuda.synchronize()
        print(pinned[0].item())
    """
    assert run(cards, code) == seen


def test_new_memory_is_not_zero_and_the_host_cannot_read_it(cards: Cards) -> None:
    code = """
        x = torch.empty(4, dtype=torch.uint8, device="cuda")
        print(x.tolist())
    """
    assert run(cards, code) == "[203, 203, 203, 203]"
    code = """
        import ctypes
        ctypes.string_at(torch.zeros(4, device="cuda").data_ptr(), 4)
    """
    assert run(cards, code) == "ended with -11"


def test_freed_memory_is_an_illegal_address(cards: Cards) -> None:
    code = f"""
        import ctypes
        runtime = ctypes.CDLL({cards.environment["LD_PRELOAD"]!r})
        address, host = ctypes.c_void_p(), (ctypes.c_char * 64)()
        codes = [runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(64))]
        codes.append(runtime.cudaMemcpy(host, address, ctypes.c_size_t(64), 2))
        codes.append(runtime.cudaFree(address))
        codes.append(runtime.cudaMemcpy(host, address, ctypes.c_size_t(64), 2))
        codes.append(runtime.cudaDeviceSynchronize())
        print(codes)
    """
    assert run(cards, code) == "[0, 0, 0, 700, 700]"


def test_a_fault_comes_late_and_stays(cards: Cards) -> None:
    cards.fail((710, "*", "666", "FillFunctor"))
    code = """
        x = torch.zeros(4, device="cuda")
        torch.cuda.synchronize()
        x.fill_(666)
        x.add_(1)
        for _ in range(2):
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print("device-side assert" in str(error), end=" ")
    """
    assert run(cards, code) == "True True"


def test_an_unknown_kernel_is_an_error_with_its_name_in_the_log(cards: Cards) -> None:
    code = """
        try:
            torch.zeros(4, device="cuda").sort()
        except RuntimeError as error:
            print("not supported" in str(error))
    """
    assert run(cards, code) == "True"
    assert cards.events("unsupported")[0].details


HOLDING = """
try:
    x = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    print("held", flush=True)
except torch.OutOfMemoryError:
    print("full", flush=True)
"""


def test_memory_is_shared_by_processes_and_returned_by_dead_ones(cards: Cards) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import torch\n{HOLDING}\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        assert cards.nvml()[0].processes == {first.pid: (3 << 30) + cards.context}
        assert run(cards, HOLDING) == "full"
        first.kill()
    assert cards.nvml()[0].used == 0
    assert run(cards, HOLDING) == "held"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1,0", "['Double 1', 'Double 0']"),
        ("GPU-00000001", "['Double 1']"),
        ("1,7,0", "['Double 1']"),
        ("-1", "[]"),
    ],
)
def test_visible_devices_are_obeyed(cards: Cards, visible: str, names: str) -> None:
    code = "print([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])"
    assert run(cards, code, CUDA_VISIBLE_DEVICES=visible) == names
