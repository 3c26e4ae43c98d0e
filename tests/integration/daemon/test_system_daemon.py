"""One system daemon for several users of a machine: they share devices, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.daemon.system import WAIT_SECONDS, SharedMachine, build, finish, processes_of
from tests.doubles.free_ports import free_ports
from tests.doubles.waiting import wait_until
from tests.integration.conftest import lives

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users"),
]

ALICE, BOB = 61001, 61002

#: Trains, and stops in the middle until a file exists. Prints a digest of its results.
TRAINING = """
import hashlib, os, sys, time, torch
seed, device, gate = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(seed)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
model.to(device)
optimiser = torch.optim.Adam(model.parameters(), 1e-3)
data = torch.randn(64, 32).to(device)
for step in range(60):
    optimiser.zero_grad()
    loss = ((model(data) - data) ** 2).mean()
    loss.backward()
    optimiser.step()
    if step == 20:
        print("begun", loss.item(), flush=True)
        while gate and not os.path.exists(gate):
            loss.item()
            time.sleep(0.01)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().cpu().numpy().tobytes())
print(digest.hexdigest(), loss.item())
"""


@pytest.fixture(scope="module")
def everybodys() -> Iterator[tuple[Path, Path]]:
    """Return a directory that every user can read, and an interpreter in it."""
    base = Path(tempfile.mkdtemp(prefix="sing-system-"))
    try:
        base.chmod(0o755)
        yield base, build(base)
    finally:
        shutil.rmtree(base)


@pytest.fixture(scope="module")
def machine(everybodys: tuple[Path, Path]) -> Iterator[SharedMachine]:
    """A machine with a running daemon."""
    machine = SharedMachine(everybodys[0] / "machine", everybodys[1])
    started = machine.start_daemon()
    assert started.returncode == 0, started.stderr
    yield machine
    machine.end([ALICE, BOB])


@pytest.fixture(autouse=True)
def _ended(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the programs that a test has left running."""
    yield
    if "machine" in request.fixturenames:
        request.getfixturevalue("machine").end_programs()


@pytest.fixture
def gate(everybodys: tuple[Path, Path]) -> Iterator[Path]:
    """A file that lets programs continue when it is created."""
    path = everybodys[0] / "gate"
    yield path
    path.unlink(missing_ok=True)


def train(machine: SharedMachine, uid: int, gate: Path) -> subprocess.Popen[str]:
    """Start a user's training run in a session that is named after its uid."""
    script = machine.base / "training.py"
    if not script.exists():
        script.write_text(TRAINING)
        script.chmod(0o644)
    under = ("-m", "jupyter_sing.cli", "run", "--name", f"of-{uid}", str(script))
    return machine.start(uid, *under, str(uid), "cuda", str(gate))


def begun(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("begun"), process.communicate()[1][-4000:]
    return line


@pytest.fixture(scope="module")
def plainly(machine: SharedMachine) -> dict[int, str]:
    """Return the results of the training runs without a proxy."""
    return {uid: machine.program(0, TRAINING, str(uid), "cpu", "") for uid in (ALICE, BOB)}


def of(machine: SharedMachine, owner: int, seen_by: int = 0) -> dict[str, Any]:
    """Return a user's session as another user sees it."""
    (found,) = (s for s in machine.status(seen_by) if s["owner"] == f"uid:{owner}")
    return found


def identities(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: fields[name].split() for name in ("Uid", "Gid", "Groups")}


REFUSED = """
import sys
from kernelproxy.common.ipc import agent_client as control
from kernelproxy.common import protocol as p
from kernelproxy.common.errors import ControlError
session = sys.argv[1]
for request in (
    p.Suspend(session), p.Resume(session), p.MigrateRequest(session, "cpu:0"),
    p.Checkpoint(session),
    p.Restore(session, "any"), p.TakeOver(session, "any"), p.SetAutomatic(session, 1.0, 1),
    p.LastCheckpoint(session), p.AwaitCheckpoint(session, "any"), p.CloseSession(session),
    p.Attach(session, "2.0"), p.Listen(session), p.Tend(session), p.Why(session, 1),
    p.Carried(session, "restore", "any"), p.OpenCheckpoint("any", session),
):
    with control.connect() as daemon:
        try:
            print("was done:", daemon.call(request, 60))
        except ControlError as error:
            print(error)
"""


def test_two_users_share_a_device(
    machine: SharedMachine, gate: Path, plainly: dict[int, str]
) -> None:
    runs = {uid: train(machine, uid, gate) for uid in (ALICE, BOB)}
    before = {uid: begun(run) for uid, run in runs.items()}

    # Everything of a session runs as its owner.
    worker = wait_until(lambda: of(machine, ALICE)["worker_pid"])
    zygote = int(Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[1])
    for pid in (worker, zygote):
        alice = {"Uid": [str(ALICE)] * 4, "Gid": [str(ALICE)] * 4, "Groups": [str(ALICE)]}
        assert identities(pid) == alice
        home = f"HOME={machine.base}/home-{ALICE}".encode()
        assert home in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

    # All users can see who holds which device; other fields are hidden.
    bobs, seen = of(machine, BOB), of(machine, BOB, seen_by=ALICE)
    assert (seen["id"], seen["owner"], seen["device"]) == (bobs["id"], f"uid:{BOB}", "cpu:0")
    assert bobs["name"] == f"of-{BOB}"
    assert bobs["log_head"] > 0
    hidden = ("name", "kernel_id", "reason", "kernel_pid", "worker_pid", "log_head", "operators")
    assert not any(seen[each] for each in hidden)
    assert of(machine, ALICE, seen_by=ALICE)["name"] == f"of-{ALICE}"

    # A user's objects can be changed by that user and by root only.
    for line in machine.program(ALICE, REFUSED, bobs["id"]).splitlines():
        assert f"belongs to uid:{BOB}: only uid:{BOB} or an admin can" in line, line
    for name in (bobs["id"], bobs["id"][:8]):  # as in the table
        refused = machine.sing(ALICE, "suspend", name)
        text = f"{name} belongs to uid:{BOB}: only uid:{BOB} or an admin can suspend it."
        assert refused.stderr == f"jupyter sing: {text}\n"
    refused = machine.sing(ALICE, "suspend", bobs["name"])  # which is hidden
    assert refused.stderr == f"jupyter sing: There is no session {bobs['name']!r}.\n"
    policy = machine.base / "policy.yaml"
    policy.write_text("defaults: {tier: premium}")
    policy.chmod(0o644)
    for command in (("stop",), ("policy", "apply", str(policy))):
        refused = machine.sing(ALICE, *command)
        assert "belongs to root" in refused.stderr
    assert machine.sing(BOB, "suspend", bobs["name"]).returncode == 0
    assert of(machine, BOB)["state"] == "suspended"
    assert machine.sing(0, "resume", bobs["id"]).returncode == 0

    gate.touch()
    for uid, run in runs.items():
        assert before[uid] + finish(run) == plainly[uid]


WATCHING = """
import json, os
from kernelproxy.common.ipc import agent_client as control
from kernelproxy.common import protocol as p
mine = f"of-{os.getuid()}"
with control.connect() as watching, control.connect() as asking:
    print(json.dumps(watching.expect(p.StatusReply, p.WatchRequest(), 120).sessions))
    asking.call(p.Suspend(mine), 120)
    while True:
        told = watching.more(120).sessions
        print(json.dumps(told))
        if any(each["name"] == mine and each["state"] == "suspended" for each in told):
            break
    asking.call(p.Resume(mine), 120)
"""


def test_a_subscriber_sees_only_public_facts_of_other_users(
    machine: SharedMachine, gate: Path
) -> None:
    runs = {uid: train(machine, uid, gate) for uid in (ALICE, BOB)}
    for run in runs.values():
        begun(run)
    bobs = of(machine, BOB)["id"]
    seen = [
        each for line in machine.program(ALICE, WATCHING).splitlines() for each in json.loads(line)
    ]
    assert {each["name"] for each in seen} == {"", f"of-{ALICE}"}
    assert all(not each["reason"] for each in seen if each["id"] == bobs)
    gate.touch()
    for run in runs.values():
        finish(run)
    names = {f"uid:{ALICE}": {f"of-{ALICE}"}, f"uid:{BOB}": {f"of-{BOB}"}}
    for uid, seen_names in ((0, names), (ALICE, names | {f"uid:{BOB}": {""}})):
        found = json.loads(machine.sing(uid, "activity", "--json").stdout)
        entries = [*found["events"], *(each for e in found["devices"] for each in e["held"])]
        for owner, expected in seen_names.items():
            assert expected <= {each["name"] for each in entries if each["owner"] == owner}
    assert f"of-{BOB}" not in json.dumps(found)


def test_sessions_of_all_users_outlive_the_agent(
    machine: SharedMachine, gate: Path, plainly: dict[int, str]
) -> None:
    runs = {uid: train(machine, uid, gate) for uid in (ALICE, BOB)}
    before = {uid: begun(run) for uid, run in runs.items()}
    pid = int(
        machine.program(
            0,
            "from kernelproxy.common.ipc import agent_client\n"
            "print(agent_client.connect().daemon_pid)",
        )
    )
    os.kill(pid, signal.SIGKILL)
    gate.touch()
    for uid, run in runs.items():
        assert before[uid] + finish(run) == plainly[uid]
    assert "the next one takes 2 sessions" in machine.log()


def test_killing_an_own_worker_harms_no_other_user(
    machine: SharedMachine, gate: Path, plainly: dict[int, str]
) -> None:
    runs = {uid: train(machine, uid, gate) for uid in (ALICE, BOB)}
    before = {uid: begun(run) for uid, run in runs.items()}
    worker = wait_until(lambda: of(machine, ALICE)["worker_pid"])
    bobs = wait_until(lambda: of(machine, BOB)["worker_pid"])
    killing = "import os, sys; os.kill(int(sys.argv[1]), 9)"
    refused = machine.start(ALICE, "-c", killing, str(bobs))
    assert "PermissionError" in refused.communicate(timeout=WAIT_SECONDS)[1]
    machine.program(ALICE, killing, str(worker))
    gate.touch()
    for uid, run in runs.items():
        assert before[uid] + finish(run) == plainly[uid]


STORE = """
import os, sys
from kernelproxy.common.ipc import agent_client as control
from kernelproxy.common.protocol import Checkpoint, CheckpointReply, OpenSession, OpenSessionReply
with control.connect() as daemon:
    session = daemon.expect(OpenSessionReply, OpenSession("notebook", "k", sys.executable)).session
    fds = [os.memfd_create(name) for name in ("host", "files")]
    os.write(fds[0], b"secret" * 1000)
    about = {"saved": [], "omitted": []}
    host = {"position": 0, "parts": [6000], "storages": [], "about": about, "files": []}
    daemon.call_with_fds(Checkpoint(session, sys.argv[1], False, host), 60, fds)
    assert isinstance(daemon.more(60), CheckpointReply)
"""

OPEN = """
import os, sys
from kernelproxy.common.ipc import agent_client as control
from kernelproxy.common.protocol import OpenCheckpoint
with control.connect() as daemon:
    _, fds = daemon.last(OpenCheckpoint(sys.argv[1]), 60)
    print(os.pread(fds[0], 6, 0).decode())
    for fd in fds:  # nothing of the daemon's may be written through them
        try:
            os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        except PermissionError:
            continue
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
"""


def test_a_checkpoint_is_its_owners_alone(machine: SharedMachine) -> None:
    machine.program(BOB, STORE, "mine")
    assert machine.program(BOB, OPEN, "mine") == "secret\n"
    assert json.loads(machine.sing(ALICE, "checkpoints", "--json").stdout) == {"checkpoints": []}
    stranger = machine.start(ALICE, "-c", OPEN, "mine")
    assert "There is no checkpoint 'mine'." in stranger.communicate(timeout=WAIT_SECONDS)[1]
    refused = machine.sing(ALICE, "checkpoint-delete", "mine")
    assert refused.stderr == "jupyter sing: There is no checkpoint 'mine'.\n"
    # Only root can read the daemon's data, and Alice may use the same name as Bob.
    for path in (machine.data, machine.data / "daemon"):
        assert path.stat().st_mode & 0o777 == 0o700
    machine.program(ALICE, STORE, "mine")
    assert machine.sing(ALICE, "checkpoint-delete", "mine").returncode == 0
    assert machine.program(BOB, OPEN, "mine") == "secret\n"


NOTEBOOK = """
import json, os
import nbformat
from nbclient import NotebookClient
os.environ["JUPYTER_DEFAULT_PROVISIONER_NAME"] = "sing"
os.chdir(os.environ["HOME"])
cells = [
    "import torch; x = torch.arange(10.0, device='cuda'); print(x.sum().item())",
    "open('made', 'w').write('first')",
    "%sing checkpoint first",
    "x += 1; open('made', 'w').write('second'); print(x.sum().item())",
    "%sing restore first",
    "print(x.sum().item(), open('made').read())",
    "%sing checkpoint second --form process",
    "%sing suspend",
    "print(x.sum().item())",
]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
NotebookClient(notebook, timeout=600, allow_errors=True).execute()
print(json.dumps(["".join(e.get("text", "") for e in c.outputs) for c in notebook.cells]))
"""


def test_a_notebook_needs_nothing_of_the_daemons_directories(machine: SharedMachine) -> None:
    said = json.loads(machine.program(ALICE, NOTEBOOK))
    assert said[0] == "45.0\n"
    assert said[2].startswith("Saved checkpoint first: ")
    assert "and 1 file" in said[2]
    assert said[3] == "55.0\n"
    assert said[4].startswith("Restored ")
    assert said[5] == "45.0 first\n"
    assert "saves no processes" in said[6]
    assert said[8] == "45.0\n"


PREPARE = """
import sys
from kernelproxy.common.ipc import agent_client as control
from kernelproxy.common.protocol import Prepare
with control.connect() as daemon:
    daemon.call(Prepare(sys.argv[1]), 60)
"""


def test_a_bad_interpreter_runs_as_its_user_and_delays_no_other(
    machine: SharedMachine, gate: Path, plainly: dict[int, str]
) -> None:
    home = Path(machine.environment(ALICE)["HOME"])
    hanging = home / "python"
    hanging.write_text(f"#!/bin/sh\nid -u > {home}/uid\nid -G > {home}/groups\nexec sleep 100000\n")
    hanging.chmod(0o755)
    finish(machine.start(ALICE, "-c", PREPARE, str(hanging), groups=[ALICE + 1000]))
    assert wait_until(lambda: (home / "groups").exists() and (home / "groups").read_text())
    assert (home / "uid").read_text() == f"{ALICE}\n"
    assert (home / "groups").read_text() == f"{ALICE} {ALICE + 1000}\n"
    for bad in (home / "missing", home, Path("/etc/passwd")):
        machine.program(ALICE, PREPARE, str(bad))
    gate.touch()
    assert begun(bobs := train(machine, BOB, gate)) + finish(bobs) == plainly[BOB]
    assert any(b"sleep" in Path(f"/proc/{p}/cmdline").read_bytes() for p in processes_of(ALICE))


#: An "interpreter" that reports as a zygote, with another user's process as its worker.
LIAR = """#!{python}
import os, socket, sys
sys.path.insert(0, {packages!r})
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Spawned, ZygoteReady
agent = socket.socket(fileno=int(sys.argv[-2]))
send_message(agent, ZygoteReady("0", "", ""))
order, fds = recv_message(agent)
victim = int(open({victim!r}).read())
send_message(agent, Spawned(order.token, victim), [os.pidfd_open(victim)])
recv_message(agent)
"""

ATTACH = """
import struct, sys
from kernelproxy.common.ipc import agent_client as control
from kernelproxy.common.shared_memory import ClientPage
from kernelproxy.common.protocol import Attach, Bell, OpenSession, OpenSessionReply
from kernelproxy.common.ipc.framing import send_message
with control.connect() as daemon:
    session = daemon.expect(OpenSessionReply, OpenSession("liar", "k", sys.argv[1])).session
    _, fds = daemon.call_with_fds(Attach(session, "0"), 60)
    page = ClientPage(fds[1], writable=True)
    page.memory_wanted, page.want_sequence = 1 << 20, 1
    sock = daemon.detach()
    send_message(sock, Bell())
    sock.recv(1)  # nothing comes but the end
"""


def test_the_daemon_kills_no_foreign_process_for_a_user(machine: SharedMachine) -> None:
    victim = machine.start(BOB, "-c", "import time; print('up', flush=True); time.sleep(100000)")
    assert victim.stdout is not None
    victim.stdout.readline()
    home = Path(machine.environment(ALICE)["HOME"])
    (machine.base / "victim").write_text(str(victim.pid))
    liar = home / "liar"
    packages, named = str(machine.packages), str(machine.base / "victim")
    liar.write_text(LIAR.format(python=machine.python, packages=packages, victim=named))
    liar.chmod(0o755)
    machine.start(ALICE, "-c", ATTACH, str(liar))
    wait_until(lambda: "that it has not forked" in machine.log())
    wait_until(lambda: "Next try" in of(machine, ALICE)["reason"])
    assert lives(victim.pid)


#: Starts two ranks, which print their sessions and wait for a file.
PARENT = """
import os, subprocess, sys
found = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], WORLD_SIZE="2")
ranks = [
    subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[1]], env=found | {"RANK": rank})
    for rank in "01"
]
print(os.environ["SING_SESSION"], flush=True)
sys.exit(sum(each.wait() for each in ranks))
"""
RANK = """
import os, sys, time, torch
torch.distributed.init_process_group("nccl")
x = torch.ones(2, device="cuda")
torch.distributed.all_reduce(x)
os.write(1, f"{os.environ['SING_SESSION']} {x.sum().item()}\\n".encode())
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
torch.distributed.all_reduce(x)
assert x.tolist() == [4, 4]
"""
INTRUDER = """
import socket, sys
from kernelproxy.common.ipc import agent_client as control
from kernelproxy.common import protocol as p
from kernelproxy.common.errors import ControlError
from kernelproxy.kernel.collectives.transport.frames import FrameKind, Header
parent, rank = sys.argv[1:]
for request in (
    p.OpenSession("child", "", sys.executable, script=True, parent=parent),
    p.JoinJob(rank, "job", 0, 2),
):
    with control.connect() as daemon:
        try:
            print("was done:", daemon.call(request, 60))
        except ControlError as error:
            print(error)
names = {line.split("@")[1] for line in open("/proc/net/unix") if "@jupyter-sing-rank-" in line}
names = [name.strip() for name in names]
assert len(names) >= 2, names
for name in names:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\\0" + name)
        token = name.removeprefix("jupyter-sing-rank-")
        try:
            sock.sendall(Header(FrameKind.hello, text=token + token).encode())
            print("closed", sock.recv(1))
        except ConnectionError:
            print("closed", b"")
"""


def test_ranks_are_their_users_and_no_other_user_joins_them(
    machine: SharedMachine, gate: Path
) -> None:
    script = machine.base / "parent.py"
    script.write_text(PARENT)
    script.chmod(0o644)
    job = machine.start(
        ALICE, "-m", "jupyter_sing.cli", "run", str(script), str(gate), str(free_ports(1)[0]), RANK
    )
    assert job.stdout is not None
    parent = job.stdout.readline().strip()
    ranks = [job.stdout.readline().split() for _ in range(2)]
    assert [total for _, total in ranks] == ["4.0", "4.0"], job.communicate()[1][-4000:]
    below = {each["id"]: each for each in machine.status(ALICE) if each["parent"] == parent}
    assert below.keys() == {session for session, _ in ranks}
    assert {each["owner"] for each in below.values()} == {f"uid:{ALICE}"}
    assert {(each["rank"], each["ranks"]) for each in below.values()} == {(0, 2), (1, 2)}
    for each in below.values():
        assert identities(each["kernel_pid"])["Uid"] == [str(ALICE)] * 4
    child, joins, *sockets = machine.program(BOB, INTRUDER, parent, ranks[0][0]).splitlines()
    assert f"belongs to uid:{ALICE}" in child
    assert f"belongs to uid:{ALICE}" in joins
    assert sockets == ["closed b''"] * len(sockets)
    gate.touch()
    finish(job)


LEFT = """
import os, socket, sys
from kernelproxy.common.ipc import agent_client as control
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Done, Left, Listen, OpenSession, OpenSessionReply
with control.connect() as daemon:
    session = daemon.expect(OpenSessionReply, OpenSession("left", "k", sys.executable)).session
    assert isinstance(daemon.call(Listen(session), 60), Done)
    sock = daemon.detach()
    send_message(sock, Left(os.open(sys.argv[1], os.O_RDONLY)))
    assert sock.recv(1) == b""
"""


def test_the_daemon_writes_to_no_file_for_a_user(machine: SharedMachine) -> None:
    precious = machine.base / "precious"
    precious.write_text("root's")
    precious.chmod(0o644)
    machine.program(ALICE, LEFT, str(precious))
    wait_until(lambda: not machine.status(0))
    assert precious.read_text() == "root's"


CROWD = """
import contextlib, socket, sys
from kernelproxy.common.ipc import agent_client as control; from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import OpenSession, OpenSessionReply, StatusRequest
with control.connect() as daemon:
    names = []
    with contextlib.suppress(ControlError):
        while len(names) < 200:
            request = OpenSession(str(len(names)), "k", sys.executable)
            names.append(daemon.expect(OpenSessionReply, request, 60).session)
    print(len(names))
held = []
for number in range(400):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(paths.socket_path()))
    with contextlib.suppress(ConnectionError):  # those too many are hung up on
        sock.sendall((b"\\xff" * 4, b"\\x10\\0\\0\\0{", b"")[number % 3])
    held.append(sock)
print("full", flush=True)
"""
HANGING = "import signal\nsignal.pause()\n"


def test_no_user_keeps_others_from_being_served(machine: SharedMachine) -> None:
    crowd = machine.start(ALICE, "-c", CROWD)
    assert finish(crowd).split() == ["64", "full"]
    hanging = machine.start(ALICE, "-c", CROWD + HANGING)
    assert hanging.stdout is not None
    hanging.stdout.readline()
    assert hanging.stdout.readline() == "full\n"
    assert machine.sing(BOB, "status").returncode == 0
    machine.program(BOB, STORE, "still")


def test_only_root_starts_it_and_only_members_of_a_group_may_use_it(
    everybodys: tuple[Path, Path],
) -> None:
    machine = SharedMachine(everybodys[0] / "grouped", everybodys[1])
    refused = machine.sing(ALICE, "daemon", "--system")
    assert refused.returncode == 1
    assert refused.stderr.startswith("jupyter sing: Only root can start the daemon")
    assert machine.start_daemon("--group", "no-such-group").stderr == (
        "jupyter sing: There is no group 'no-such-group'.\n"
    )
    assert machine.start_daemon("--group", "root").returncode == 0
    try:
        refused = machine.sing(BOB, "status")
        assert "is for a group that you are not in" in refused.stderr
        assert machine.sing(0, "status").returncode == 0
        again = machine.start_daemon()
        assert again.returncode == 1
        assert "already" in again.stderr
    finally:
        machine.end([])


def test_a_socket_that_is_not_roots_is_not_used(everybodys: tuple[Path, Path]) -> None:
    machine = SharedMachine(everybodys[0] / "fakes", everybodys[1])
    fake = machine.base / "fake"
    fake.mkdir(mode=0o755)
    os.chown(fake, ALICE, ALICE)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(fake / "agent.sock"))
        listener.listen()
        refused = machine.sing(BOB, "status", JUPYTER_SING_SYSTEM_DIR=str(fake))
        assert "does not belong to root" in refused.stderr
        # Nor in a directory of root's, if the process that listens is not root's.
        os.chown(fake, 0, 0)
        os.chown(fake / "agent.sock", 0, 0)
        serving = (
            "import socket, time\ns = socket.socket(fileno=0)\ns.listen()\n"
            "print('up', flush=True)\ntime.sleep(1e6)"
        )
        process = subprocess.Popen(
            [str(machine.python), "-c", serving],
            stdin=listener.fileno(), stdout=subprocess.PIPE, user=ALICE, group=ALICE,
            extra_groups=[], env=machine.environment(ALICE),
        )  # fmt: skip
        try:
            assert process.stdout is not None
            process.stdout.readline()
            os.chmod(fake / "agent.sock", 0o666)
            refused = machine.sing(BOB, "status", JUPYTER_SING_SYSTEM_DIR=str(fake))
            assert f"is served by user {ALICE}, not by root" in refused.stderr
        finally:
            process.kill()
            process.communicate()
