"""Notebooks of a real server are restored from checkpoints, whichever processes were killed.

One server has two notebooks, one for each form of a checkpoint. Every combination of kernels,
workers, agent and server is killed. Then the test restores what a user finds: kernels that the
server has started again, notebooks opened at a new server, or kernels that have survived. If the
agent is one of an even number of victims, its supervisor is killed with it, hence the whole daemon.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_core.paths import jupyter_runtime_dir

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, ProcessError
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.criu import mode_probe as forms
from tests.conftest import processes_in
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import SECONDS_MAX, Kernel, Ran, sessions, wait_for_sessions
from tests.e2e.notebooks.test_server import Server
from tests.e2e.trainers import agent_pid
from tests.integration.conftest import (
    children_of,
    command_of,
    kill_at_once,
    parent_of,
    supervisor_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG_SECONDS = 5 * SECONDS_MAX
VICTIMS = ("kernel", "worker", "agent", "server")
COMBINATIONS = [
    victims for count in (1, 2, 3, 4) for victims in itertools.combinations(VICTIMS, count)
]
#: Each alone, the whole daemon with and without the server, and all.
SOME = [*((victim,) for victim in VICTIMS), ("worker", "agent"), ("agent", "server"), VICTIMS]
OPTIONS = (
    "--KernelRestarter.time_to_dead=0.2",  # seconds until a dead kernel is noticed
    "--KernelRestarter.restart_limit=1000",
    f"--SingProvisioner.open_timeout={LONG_SECONDS}",
)
#: Specification of a kernel whose process is not saved, and which runs in no sandbox.
PLAIN = {
    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "display_name": "plain",
    "language": "python",
    "metadata": {
        "kernel_provisioner": {"provisioner_name": "sing", "config": {"save_process": False}}
    },
}
NOTEBOOK = """\
import dataclasses, os, random, subprocess
import numpy as np
import torch
random.seed(1); np.random.seed(2); torch.manual_seed(3)
chance = np.random.default_rng(4)
stream = torch.Generator("cuda").manual_seed(5)

@dataclasses.dataclass
class Step:
    number: int
    loss: str

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(48, 48), torch.nn.Linear(48, 48)
        self.norm = torch.nn.BatchNorm1d(48)
        self.last.weight = self.first.weight  # tied
    def forward(self, x):
        return self.last(torch.nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2))

net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=1000)
batch = torch.randn(32, 48, device="cuda")
part, turned = batch[4:8, 2:], batch.T  # views
host = torch.arange(30_000.0)
array = host.numpy()  # the same memory
steps = []
about = {"steps": steps, "net": net}
scale = 0.1

def trainer(name):
    done = 0
    def train(count):
        nonlocal done
        for _ in range(count):
            noise = torch.rand(32, 48, device="cuda") * random.random() * np.random.rand()
            noise = noise + torch.randn(32, 48, device="cuda", generator=stream) * chance.random()
            noise = noise + torch.rand(48).cuda()
            loss = net(batch + scale * noise).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
            done += 1
            steps.append(Step(done, loss.item().hex()))
            with open(name, "a") as file:
                print(*dataclasses.astuple(steps[-1]), file=file)
        return [step.loss for step in steps[-count:]]
    return train

train = trainer("steps.txt")
train(4)
with open("table.csv", "w") as table:
    table.write("1,2")
_ = subprocess.run(["sh", "-c", "echo child > child.txt"], check=True)
notes = open("notes.txt", "w+"); _ = notes.write("first "); notes.flush()
"""
# State that only a saved process keeps.
PROCESS = """
import threading
numbers = (n * n for n in range(1000))
_ = [next(numbers) for _ in range(3)]
lock = threading.Lock(); _ = lock.acquire()
passed, turn = [], threading.Semaphore(0)
def wait():
    with lock:
        passed.append("through")
def tick():
    while True:
        turn.acquire(); passed.append("tick")
waiting = threading.Thread(target=wait, daemon=True)
waiting.start()
threading.Thread(target=tick, daemon=True).start()
"""
# Prints the state without changing it.
LOOK = """
import hashlib, pickle
def digest(value):
    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().tolist()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()[:16]
looks = {
    "weights": net.state_dict(), "optimizer": optimizer.state_dict(),
    "scheduler": scheduler.state_dict(), "tensors": [batch, part, turned, host],
    "random": random.getstate(), "numpy": np.random.get_state()[1].tolist(),
    "chance": chance.bit_generator.state, "torch": torch.get_rng_state(),
    "device": torch.cuda.get_rng_state(), "stream": stream.get_state(),
    "steps": [dataclasses.astuple(step) for step in steps],
}
print(*(f"{name} {digest(value)}" for name, value in looks.items()), sep="\\n")
print(notes.tell(), os.getcwd(), scale, train.__globals__ is globals())
print(train.__closure__[0].cell_contents, about["steps"] is steps, about["net"] is net)
print(net.first.weight is net.last.weight, type(steps[0]) is Step, isinstance(net, Net))
print([group["params"][0] is net.first.weight for group in optimizer.param_groups])
print(part.data_ptr() - batch.data_ptr(), part.stride(), turned.data_ptr() == batch.data_ptr())
print("later" in globals())
"""
LOOK_AT_PROCESS = """
print(next(numbers), lock.locked(), waiting.is_alive(), passed)
turn.release(); lock.release(); waiting.join()
while len(passed) < 2:
    time.sleep(0.01)
print(sorted(passed))
"""
GO_ON = """\
import time
print(*train(5), sep="\\n")
scale = 0.5  # of what functions see
print(*train(2), sep="\\n")
batch.zero_(); array[7] = -1
print(part.abs().sum().item(), turned.abs().sum().item(), host[7].item())
_ = notes.write("and more"); notes.flush(); print(open("notes.txt").read())
table = open("table.csv", "w"); _ = table.write("changed"); table.close(); os.remove("child.txt")
later = 1
"""


class KilledNotebook(Kernel):
    """A notebook that is saved in one form, in a directory of its own.

    Parameters
    ----------
    directory : Path
        In the server's.
    form : str
    title : str
        Of the notebook.
    """

    def __init__(self, directory: Path, form: str, title: str = "one") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.form, self.name = directory, form, f"of-{form}"
        self.path, self.kernel_id = f"{form}/{title}.ipynb", ""
        process = form == "process"
        self.code = {
            "begin": NOTEBOOK + (PROCESS if process else ""),
            "put away": f"%sing checkpoint {self.name} --form {form}",
            "restore": f"%sing restore {self.name} --form {form}",
            "look": LOOK,
            "go on": GO_ON + (LOOK_AT_PROCESS if process else ""),
            "go on again": "print(*train(5))",
        }
        #: The output of the cells when it was saved and continued.
        self.printed: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self._connected = False

    def open(self, server: Server) -> None:
        """Open it, which starts a kernel."""
        name = "python3" if self.form == "process" else "plain"
        about = {"path": self.path, "type": "notebook", "name": self.path, "kernel": {"name": name}}
        self.kernel_id = server.fetch("api/sessions", "POST", about)["kernel"]["id"]

    def connect(self) -> None:
        """Connect a client to the current kernel."""
        self.disconnect()
        self.client = BlockingKernelClient()
        self.client.load_connection_file(f"{jupyter_runtime_dir()}/kernel-{self.kernel_id}.json")
        # Without heartbeats: a kernel that is slow to start would count as dead.
        self.client.start_channels(hb=False)
        self._connected = True
        self.client.wait_for_ready(timeout=LONG_SECONDS)

    def disconnect(self) -> None:
        """Close the client. Idempotent."""
        if self._connected:
            self._connected = False
            self.client.stop_channels()
            self.client.context.destroy(linger=0)

    def read_files(self) -> dict[str, str]:
        """Return the files that the notebook has written."""
        files = (path for path in self.directory.iterdir() if path.suffix in (".csv", ".txt"))
        return {path.name: path.read_text() for path in files}


class Notebooks(list[KilledNotebook]):
    """Notebooks that act at the same time."""

    def connect(self) -> None:
        """Connect clients to the current kernels."""
        for notebook in self:
            notebook.connect()

    def disconnect(self) -> None:
        for notebook in self:
            notebook.disconnect()

    def begin(self, cell: str) -> list[str]:
        """Start a cell in all of them."""
        return [notebook.begin(notebook.code[cell]) for notebook in self]

    def end(self, asked: Sequence[str]) -> list[tuple[KilledNotebook, Ran]]:
        """Wait for the cells of `begin`."""
        both = zip(self, asked, strict=True)
        return [(notebook, notebook.finish(message)) for notebook, message in both]

    def run(self, cell: str) -> list[tuple[KilledNotebook, str]]:
        """Run a cell in all of them; return the output of each."""
        found = self.end(self.begin(cell))
        for _, ran in found:
            assert (ran.error, ran.error_text, ran.stderr) == ("", "", ""), cell
        return [(notebook, ran.stdout) for notebook, ran in found]

    def save_checkpoint(self) -> None:
        """Make the checkpoints, and record the output that every restore must reproduce."""
        self.run("begin")
        for notebook, said in self.run("put away"):
            assert said.startswith(f"Saved checkpoint {notebook.name}: ")
            assert "not saved" not in said
            notebook.files = notebook.read_files()
            assert notebook.files["table.csv"] == "1,2"
        for cell in ("look", "go on", "go on again"):
            for notebook, said in self.run(cell):
                notebook.printed[cell] = said

    def restore(self) -> None:
        """Restore all by name; their state, and the output of the next cells, must be as before."""
        for notebook, said in self.run("restore"):
            assert said.startswith("Restored "), said
            assert (", with the process" in said) == (notebook.form == "process"), said
            assert notebook.read_files() == notebook.files
        self.check("look")
        self.check("go on")

    def check(self, cell: str) -> None:
        """Run a cell; it must print what it has printed before."""
        for notebook, said in self.run(cell):
            assert said == notebook.printed[cell], notebook.form


class World:
    """A server, its notebooks, and the daemon.

    Parameters
    ----------
    directory : Path
    forms : sequence of str
        Each has a notebook.
    """

    def __init__(self, directory: Path, forms: Sequence[str]) -> None:
        self.root = directory / "root"
        self.notebooks = Notebooks(KilledNotebook(self.root / form, form) for form in forms)
        self._killed: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Start a server, and open the notebooks."""
        self.server = Server(self.root, *OPTIONS)
        try:
            for notebook in self.notebooks:
                notebook.open(self.server)
        except BaseException:
            self.server.close()
            raise

    def find(self, victims: Sequence[str]) -> list[int]:
        """Return the pids of the processes to kill."""
        found, pids = wait_for_sessions(self._complete), list[int]()
        if "kernel" in victims:
            pids += [existing(each["kernel_pid"]) for each in found]
        if "worker" in victims:
            pids += [existing(each["worker_pid"]) for each in found]
        if "agent" in victims:
            agent = agent_pid()
            pids += [agent, supervisor_of(agent)] if _with_supervisor(victims) else [agent]
        if "server" in victims:
            pids.append(self.server.process.pid)
        return pids

    def kill(self, victims: Sequence[str]) -> None:
        """Kill processes; none of them notices the end of another."""
        pids = self.find(victims)
        kill_at_once(*pids)
        self._killed.update(pids)
        if "server" in victims:
            self.server.process.wait()

    def come_back(self, victims: Sequence[str]) -> None:
        """Wait until the server and the daemon have recovered, and do what else a user does."""
        if "server" in victims:
            self.begin()  # it finds the running kernels
        if "kernel" not in victims and _with_supervisor(victims):
            for each in self.notebooks:  # its session has ended
                self.server.fetch(f"api/kernels/{each.kernel_id}/restart", "POST")
        wait_until(self._there, LONG_SECONDS)

    def _complete(self, found: list[SessionView]) -> bool:
        pids = [each[key] for each in found for key in ("kernel_pid", "worker_pid")]
        return len(found) == len(self.notebooks) and None not in pids

    def _there(self) -> bool:
        """True if all notebooks have kernels, and none of the killed ones."""
        with contextlib.suppress(ControlError):  # there is no daemon yet
            found = {each["kernel_id"]: each["kernel_pid"] for each in sessions()}
            wanted = {each.kernel_id for each in self.notebooks}
            return found.keys() == wanted and not {None, *self._killed} & {*found.values()}
        return False

    def wait_for_order(self) -> None:
        """Wait until only the processes and files of the current notebooks are left."""
        left: list[str] = []

        def in_order() -> bool:
            left[:] = self._left()
            return not left

        try:
            wait_until(in_order, LONG_SECONDS)
        except AssertionError:
            raise AssertionError(f"left: {left}") from None

    def _left(self) -> list[str]:
        """Return what is left of notebooks that have ended."""
        found, agent, runtime = sessions(), agent_pid(), paths.runtime_dir()
        supervisor = supervisor_of(agent)
        zygotes = {
            pid for pid in children_of(agent) if b"kernelproxy.worker.zygote" in command_of(pid)
        }
        known = {self.server.process.pid, agent, supervisor, *zygotes}
        known.update(pid for each in found if (pid := each["worker_pid"]) is not None)
        for each in found:
            pid = each["kernel_pid"] or 1
            while pid > 1 and pid not in known:  # and its sandbox
                known.add(pid)
                pid = parent_of(pid)
        processes = processes_in(runtime)
        left = [f"{pid}: {processes[pid]}" for pid in processes.keys() - known]
        for name, pid in (("agent", agent), ("keeper", supervisor)):
            logs = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "sing-log" in _read_link(fd)]
            if len(logs) != len(found):
                left.append(f"{len(logs)} logs of the {name}")
        data = paths.data_dir()
        left += [str(path) for path in data.glob("processes/*/*") if path.is_dir()]
        needed = {each["id"] for each in found} | {each.name for each in self.notebooks}
        left += [str(p) for p in data.glob("states/manifests/*/*.json") if p.stem not in needed]
        managed = [each for each in self.notebooks if each.form == "process"]
        directories = list(runtime.glob("kernels/*"))
        return left + [str(path) for path in directories if len(directories) > len(managed)]

    def close(self) -> None:
        """Shut everything down, as a user does."""
        self.notebooks.disconnect()
        if self.server.process.poll() is None:
            for kernel in self.server.fetch("api/kernels"):
                self.server.fetch(f"api/kernels/{kernel['id']}", "DELETE")
            self.server.close()


def _with_supervisor(victims: Sequence[str]) -> bool:
    """True if the supervisor is killed, too; it does not restart agents that die too often."""
    return "agent" in victims and len(victims) % 2 == 0


def _read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""  # closed since


@pytest.fixture
def world(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A server with a saved notebook for each form that works here."""
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1,cpu:1GiB@1")
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    spec = tmp_path / "jupyter" / "kernels" / "plain"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps(PLAIN))
    which = ["namespace"]
    try:
        forms.find(runtime_dir)  # also stores the result, before the daemon needs it
        which.append("process")
    except ProcessError:
        if forms.VARIABLE in os.environ:
            raise
    made = World(tmp_path, which)
    try:
        made.notebooks.connect()
        made.notebooks.save_checkpoint()
        yield made
    finally:
        made.close()


@contextmanager
def told(what: object) -> Iterator[None]:
    """Add the current round to the error of a failing test."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the round of {what}")
        raise


def test_any_process_may_be_killed_and_everything_recovers(world: World) -> None:
    check_that_all_come_back(world, SOME)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_in_every_combination_everything_comes_back(world: World) -> None:
    check_that_all_come_back(world, COMBINATIONS)


def check_that_all_come_back(world: World, combinations: Sequence[tuple[str, ...]]) -> None:
    """Kill each combination of processes, and restore the notebooks after each."""
    for victims in combinations:
        with told(victims):
            world.kill(victims)
            world.come_back(victims)
            if victims in (("worker",), ("agent",)):
                world.notebooks.check("go on again")  # nothing was lost
            else:
                world.notebooks.connect()
            world.notebooks.restore()
            world.wait_for_order()


def test_a_process_killed_during_restores_costs_that_restore_at_most(
    world: World,
) -> None:
    for victims in (("worker",), ("agent",)):
        with told(victims):
            pids = world.find(victims)
            asked = world.notebooks.begin("restore")
            with contextlib.suppress(ProcessLookupError):  # the restore has already finished
                kill_at_once(*pids)
            world.notebooks.end(asked)  # it was restored, or a line gives the reason
            world.notebooks.restore()
            world.wait_for_order()


def test_three_times_back_and_two_notebooks_from_one_checkpoint(world: World) -> None:
    for _ in range(3):
        world.notebooks.restore()
    twins = Notebooks(
        KilledNotebook(each.directory, each.form, "two") for each in reversed(world.notebooks)
    )
    try:
        for notebook, twin in zip(reversed(world.notebooks), twins, strict=True):
            twin.printed, twin.files = notebook.printed, notebook.files
            twin.open(world.server)
        twins.connect()
        twins.restore()
        found = {each["kernel_id"]: each for each in sessions()}
        for notebook, twin in zip(reversed(world.notebooks), twins, strict=True):
            one, two = found[notebook.kernel_id], found[twin.kernel_id]
            if one["device"] == two["device"]:  # the scheduler may choose either
                other = "cpu:1" if one["device"] == "cpu:0" else "cpu:0"
                path = f"jupyter-sing/api/sessions/{two['id']}/migrate"
                world.server.fetch(path, "POST", {"device": other})
        world.notebooks.restore()
        twins.check("go on again")
        world.notebooks.check("go on again")
    finally:
        twins.disconnect()
