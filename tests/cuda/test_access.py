"""Only workers open a card, whatever a notebook and its children do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernelproxy.kernel import gpu_access
from tests.doubles.cuda.cards import Cards
from tests.e2e.kernels import Kernel

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: Everything that would open a card in a process without our measures.
TRIES = """
import ctypes, multiprocessing, os, subprocess, sys
import torch
x = torch.arange(6., device="cuda")
found = {}

def by_ctypes():
    address = ctypes.c_void_p()
    runtime = ctypes.CDLL(RUNTIME)
    return [ctypes.CDLL("libcuda.so.1").cuInit(0), runtime.cudaMalloc(ctypes.byref(address), 64)]

found["ctypes"] = by_ctypes()
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
found["ctypes, visible"] = by_ctypes()
PLAIN = '''
import torch
try:
    torch.zeros(1, device="cuda")
    print("opened")
except RuntimeError as error:
    print("refused")
'''
def child(*options, **more):
    done = subprocess.run([sys.executable, *options, "-c", PLAIN], env={**os.environ, **more},
                          capture_output=True, text=True)
    return done.stdout.strip()
found["child"] = child()
# One that reads no environment variables has no session of its own.
found["isolated"] = child("-I")
found["isolated, visible"] = child("-I", CUDA_VISIBLE_DEVICES="0")
"""
SPAWNED = """
import torch
def work(queue):
    try:
        queue.put(str(torch.zeros(1, device="cuda").tolist()))
    except RuntimeError as error:
        queue.put("refused")
"""
SPAWN = """
import multiprocessing, spawned
context = multiprocessing.get_context("spawn")
queue = context.Queue()
process = context.Process(target=spawned.work, args=(queue,))
process.start()
found["spawn"] = queue.get()
process.join()
"""
#: torchvision's own CUDA kernels, of which the double knows those of `nms`.
TORCHVISION = """
import torchvision
torch.manual_seed(0)
corners = torch.rand(200, 2) * 100
boxes, scores = torch.cat([corners, corners + torch.rand(200, 2) * 30 + 1], 1), torch.rand(200)
expected = torchvision.ops.nms(boxes, scores, 0.5)
kept = torchvision.ops.nms(boxes.cuda(), scores.cuda(), 0.5)
print(len(kept), torch.equal(kept.cpu(), expected))
try:
    torchvision.ops.roi_align(torch.ones(1, 1, 9, 9, device="cuda"), [boxes[:1].cuda()], 2)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


@pytest.fixture
def _guarded(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the measures against opening a GPU's files include those of the double's cards."""
    files = f"{gpu_access.FILES}:{cards.directory}/dev/nvidia"
    monkeypatch.setattr(gpu_access, "FILES", files)


@pytest.mark.usefixtures("_guarded", "operators")
def test_only_workers_open_a_card(
    cards: Cards, double: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    notebook: Kernel = request.getfixturevalue("notebook")
    (tmp_path / "spawned.py").write_text(SPAWNED)
    tries = TRIES.replace("RUNTIME", repr(str(double)))
    ran = notebook.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{tries}\n{SPAWN}")
    assert ran.error_text == ""
    ran = notebook.run("print(found)")
    no_device = [100, 100]
    assert ran.stdout == (
        f"{{'ctypes': {no_device}, 'ctypes, visible': {no_device}, 'child': 'opened', "
        "'isolated': 'refused', 'isolated, visible': 'refused', 'spawn': '[0.0]'}\n"
    )
    ran = notebook.run(TORCHVISION)
    # Of the worker: the double has no kernel for `roi_align`.
    assert ran.stdout == "183 True\nCUDA error: operation not supported\n"
    ran = notebook.run("print((x + 1).tolist())")
    assert (ran.stdout, ran.error_text) == ("[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]\n", "")
    opened = cards.events("cuInit", "context")
    assert opened
    assert [each for each in opened if not each.command.startswith("sing: ")] == []
    assert [each for each in cards.events("nvmlInit") if "kernelproxy" not in each.command] == []
    assert cards.events("denied")  # the measures were needed


@pytest.mark.usefixtures("cards")
def test_without_the_measures_a_child_opens_the_card(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("JUPYTER_SING_DIRECT_GPU", "1")
    notebook: Kernel = request.getfixturevalue("notebook")
    notebook.run(
        "import subprocess, sys\n"
        "code = 'import torch; torch.zeros(1, device=\"cuda\")'\n"
        "subprocess.run([sys.executable, '-I', '-c', code])"
    )
    assert [each for each in cards.events("context") if not each.command.startswith("sing: ")]


#: A tensor of the session, and memory that the process itself gets from the driver.
BESIDE = """
import ctypes
import torch
x = torch.arange(6., device="cuda")
address = ctypes.c_void_p()
print(ctypes.CDLL(RUNTIME).cudaMalloc(ctypes.byref(address), 64), (x * 2).sum().item())
"""


@pytest.mark.parametrize(
    ("options", "printed"), [(["--direct-gpu"], "0 30.0\n"), ([], "100 30.0\n")]
)
def test_a_program_opens_the_card_only_with_direct_gpu(
    cards: Cards, double: Path, tmp_path: Path, options: list[str], printed: str
) -> None:
    program = tmp_path / "beside.py"
    program.write_text(BESIDE.replace("RUNTIME", repr(str(double))))
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", *options, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (printed, 0), done.stderr
    others = [e for e in cards.events("context") if not e.command.startswith("sing: ")]
    assert bool(others) == bool(options)
