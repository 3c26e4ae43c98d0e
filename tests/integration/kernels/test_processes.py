"""Processes that are dumped and restored, by root and by an ordinary user."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernelproxy.common.errors import ProcessError
from kernelproxy.criu import criu, images, sandbox
from kernelproxy.criu.dump_target import Target
from kernelproxy.criu.sandbox import Form
from tests.doubles.free_ports import free_ports
from tests.doubles.kernel import sandboxed
from tests.doubles.kernel.sandboxed import SECONDS_MAX, SETUP, STEP, SUM, SandboxedProgram, closing
from tests.doubles.waiting import wait_until

ROOT = Path(__file__).parents[3]
IS_ROOT = os.geteuid() == 0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["root", "user"] if IS_ROOT else ["user"])
def form(request: pytest.FixtureRequest, criu_program: str) -> Form:
    """Each form that this user can use."""
    return Form(request.param, criu_program)


@pytest.fixture
def answering(form: Form) -> Iterator[SandboxedProgram]:
    """A small program in a sandbox."""
    with closing(sandboxed.start_program(form)) as program:
        yield program


# Opens a database for all threads, and leaves a transaction open.
BEGIN = """
import sqlite3, threading
database = sqlite3.connect({file!r}, check_same_thread=False)
_ = database.executescript("CREATE TABLE t (i); BEGIN; INSERT INTO t VALUES (5)")
"""


def save(
    form: Form, program: SandboxedProgram, directory: Path, *, leave_running: bool = False
) -> Path:
    """Save a program; return where its images are."""
    criu.dump(
        form, program.pid, directory, wake_fd=program.ask("wake"), leave_running=leave_running
    )
    return directory


@contextmanager
def watched(pid: int) -> Iterator[int]:
    """Yield a descriptor of a process, which is readable when it has ended."""
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def has_ended(fd: int, seconds: float = SECONDS_MAX) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


def commands_with(text: str) -> list[str]:
    """Return the command lines of all processes that contain a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if text in command:
            found.append(command)
    return found


def wrapper(directory: Path, program: str, instead: str) -> str:
    """Return a stub of CRIU that runs another command first."""
    file = directory / "criu"
    file.write_text(f'#!/bin/sh\n{instead}\nexec {program} "$@"\n')
    file.chmod(0o755)
    return str(file)


# ---------------------------------------------------------------- kernels


def test_a_kernel_comes_back_as_often_as_it_is_wanted(form: Form, tmp_path: Path) -> None:
    images_at = tmp_path / "images"
    with closing(sandboxed.start(form, tmp_path)) as kernel:
        kernel.run(SETUP.format(file=str(tmp_path / "data")))
        assert kernel.run(STEP, "state") == [42, 3, "45", True, SUM]
        wake = kernel.run("", "wake")
        frozen = criu.dump(form, kernel.pid, images_at, wake_fd=wake, leave_running=False)
        assert 0 < frozen < SECONDS_MAX
        assert kernel.process.wait(SECONDS_MAX) == -signal.SIGKILL
    with (tmp_path / "data").open("a") as file:
        file.write("and grows")
    for _ in range(3):
        images.check(images_at)
        with closing(sandboxed.restore(form, images_at)) as again:
            assert again.run(STEP, "state") == [43, 4, "67", True, SUM]
            assert again.run(STEP, "state") == [44, 5, "89", True, SUM]


def test_copies_of_a_kernel_live_beside_it(form: Form, tmp_path: Path) -> None:
    images_at = tmp_path / "images"
    with closing(sandboxed.start(form, tmp_path)) as kernel:
        kernel.run(SETUP.format(file=str(tmp_path / "data")))
        wake = kernel.run("", "wake")
        criu.dump(form, kernel.pid, images_at, wake_fd=wake, leave_running=True)
        assert kernel.run(STEP, "state")[:2] == [42, 3]
        old = sorted(criu.listening(images_at))
        maps = [dict(zip(old, free_ports(len(old)), strict=True)) for _ in range(2)]
        with (
            closing(sandboxed.restore(form, images_at, ports=maps[0])) as one,
            closing(sandboxed.restore(form, images_at, ports=maps[1])) as two,
        ):
            assert one.run(STEP, "state")[:2] == [42, 3]
            assert one.run(STEP, "state")[:2] == [43, 4]
            assert two.run(STEP, "state")[:2] == [42, 3]
            assert kernel.run(STEP, "state")[:2] == [43, 4]
            assert len({kernel.pid, one.pid, two.pid}) == 3


def test_a_restored_kernel_is_woken_interrupted_and_saved_again(form: Form, tmp_path: Path) -> None:
    images_at = tmp_path / "images"
    with closing(sandboxed.start(form, tmp_path)) as kernel:
        kernel.run(SETUP.format(file=str(tmp_path / "data")))
        wake = kernel.run("", "wake")
        begun = tmp_path / "begun"
        code = f"open({str(begun)!r}, 'w').close()\nline = os.read(wait, 1000)"
        waits = kernel.begin(code, "line.decode()")
        wait_until(begun.exists)
        criu.dump(form, kernel.pid, images_at, wake_fd=wake, leave_running=True)
        criu.wake(kernel.pid, wake, {"restored": False})
        assert json.loads(kernel.finish(waits)) == {"restored": False}
    with closing(sandboxed.restore(form, images_at)) as again:
        # In the middle of the cell: the client that sent it is gone.
        asked = again.begin("", "line.decode()")
        criu.wake(again.pid, images_at, {"restored": True, "session": "s-1"})
        assert json.loads(again.finish(asked)) == {"restored": True, "session": "s-1"}

        started = tmp_path / "started"
        sleeps = again.begin(f"open({str(started)!r}, 'w').close()\ntime.sleep(1000)")
        wait_until(started.exists)
        again.process.send_signal(signal.SIGINT)  # passed on
        assert again.reply(sleeps)["ename"] == "KeyboardInterrupt"
        sleeps = again.begin(f"os.unlink({str(started)!r})\ntime.sleep(1000)")
        wait_until(lambda: not started.exists())
        os.kill(again.pid, signal.SIGINT)
        assert again.reply(sleeps)["ename"] == "KeyboardInterrupt"

        later = tmp_path / "later"
        criu.dump(form, again.pid, later, wake_fd=wake, leave_running=False)
    with closing(sandboxed.restore(form, later)) as last:
        assert last.run(STEP, "state")[:2] == [42, 3]


def test_a_process_that_cannot_be_saved_continues(form: Form, tmp_path: Path) -> None:
    outside = socket.socket(socket.AF_UNIX)
    outside.bind(str(tmp_path / "socket"))
    outside.listen()
    with outside, closing(sandboxed.start(form, tmp_path)) as kernel:
        kernel.run(SETUP.format(file=str(tmp_path / "data")))
        kernel.run(
            "import socket; inside = socket.socket(socket.AF_UNIX)\n"
            f"inside.connect({str(tmp_path / 'socket')!r})"
        )
        peer, _ = outside.accept()
        wake = kernel.run("", "wake")
        for leave_running in (True, False):
            with pytest.raises(ProcessError, match="a Unix socket connects it") as caught:
                criu.dump(
                    form,
                    kernel.pid,
                    tmp_path / "images",
                    wake_fd=wake,
                    leave_running=leave_running,
                )
            assert caught.value.reason == "dump"
            assert list((tmp_path / "images").iterdir()) == []
        assert kernel.run(STEP, "state")[:2] == [42, 3]
        peer.close()
        kernel.run("inside.close()")
        criu.dump(form, kernel.pid, tmp_path / "images", wake_fd=wake, leave_running=True)


# ---------------------------------------------------------------- what is kept


def test_a_process_has_what_it_had(form: Form, tmp_path: Path) -> None:
    directory = tmp_path / "somewhere"
    directory.mkdir()
    program = sandboxed.start_program(form, env={"SING_TRIAL": "a b"}, cwd=directory)
    with closing(program):
        program.ask("os.umask(0o027)")
        program.ask("resource.setrlimit(resource.RLIMIT_CORE, (0, 0))")
        program.ask("resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))")
        asked = (
            "(os.environ['SING_TRIAL'], os.getcwd(), os.umask(0o027), os.getpid(), os.getsid(0),"
            " resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE),"
            " os.readlink('/proc/self/fd/0'), os.getuid(), os.path.exists('/proc/1/stat'))"
        )
        before = program.ask(asked)
        assert before[:3] == ("a b", str(directory), 0o027)
        assert before[3] == before[4]  # a session of its own
        assert before[8] == os.getuid()
        images_at = save(form, program, tmp_path / "images")
    with closing(sandboxed.restore_program(form, images_at)) as again:
        assert again.ask(asked) == before
        assert again.process.stdout is not None
        again.ask("os.write(1, b'to the new one\\n')")
        assert again.process.stdout.readline() == b"to the new one\n"


def test_images_of_earlier_versions_are_restored(
    form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under those versions, an ordinary user was root in a sandbox."""
    options = sandbox.options
    within = ["--root"] if form.kind == "user" else []
    monkeypatch.setattr(sandbox, "options", lambda *given: [*options(*given), *within])
    with closing(sandboxed.start_program(form)) as program:
        monkeypatch.undo()
        before = program.ask("os.getuid()")
        assert before == 0 or form.kind == "root"
        saved = save(form, program, tmp_path / "saved")
    info = json.loads((saved / images.INFO).read_text())
    del info["as_root"]
    (saved / images.INFO).write_text(json.dumps(info | {"version": 1}))
    with closing(sandboxed.restore_program(form, saved)) as restored:
        criu.wake(restored.pid, saved, {})
        assert restored.ask("os.getuid()") == before
        again = save(form, restored, tmp_path / "again", leave_running=True)
    with closing(sandboxed.restore_program(form, again)) as restored:
        assert restored.ask("os.getuid()") == before


def test_images_are_for_their_owner_alone(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir(mode=0o755)
    images_at = save(form, answering, tmp_path / "images", leave_running=True)
    assert images_at.stat().st_mode & 0o777 == 0o700
    before = {file.name: file.read_bytes() for file in images_at.iterdir()}
    with closing(sandboxed.restore_program(form, images_at)) as again:
        assert again.ask("1 + 1") == 2
    assert {file.name: file.read_bytes() for file in images_at.iterdir()} == before


def test_clocks_are_monotonic(form: Form, answering: SandboxedProgram, tmp_path: Path) -> None:
    day = 86400
    before = answering.ask("(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))")
    images_at = save(form, answering, tmp_path / "images")
    # As if it had been saved after this machine had run for another day.
    described = json.loads((images_at / images.INFO).read_text())
    ahead = 0
    if form.kind == "user":  # as root, CRIU uses its own record
        ahead = day
        described["monotonic"] += day * 10**9
        described["boottime"] += day * 10**9
        (images_at / images.INFO).write_text(json.dumps(described))
    for step in range(2):
        with closing(sandboxed.restore_program(form, images_at)) as again:
            after = again.ask("(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))")
            assert after[0] >= before[0] + ahead
            assert after[1] >= before[1] + ahead
            assert after[0] < before[0] + ahead + SECONDS_MAX
            before, ahead = after, 0
            images_at = save(form, again, tmp_path / f"again-{step}")


def test_locks_are_held_again_unless_another_holds_them(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    file = tmp_path / "locked"
    answering.ask(f"names.update(held=open({str(file)!r}, 'w'))")
    answering.ask("fcntl.flock(held, fcntl.LOCK_EX)")
    images_at = save(form, answering, tmp_path / "images", leave_running=True)
    with closing(sandboxed.restore_program(form, images_at)) as again:
        assert again.ask("held.closed") is False
    answering.close()
    with closing(sandboxed.restore_program(form, images_at)) as again:
        with file.open("r") as mine, pytest.raises(BlockingIOError):
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert again.ask("held.closed") is False


def test_removed_files_that_are_open_come_along(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    file = tmp_path / "removed"
    answering.ask(f"names.update(held=open({str(file)!r}, 'w+b'))")
    answering.ask("(held.write(b'x' * (9 << 20)), held.flush(), os.unlink(held.name))")
    images_at = save(form, answering, tmp_path / "images")
    with closing(sandboxed.restore_program(form, images_at)) as again:
        assert again.ask("held.seek(0), len(held.read())") == (0, 9 << 20)
    assert not file.exists()


def test_memory_that_is_shared_and_children_come_along(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    for code in (
        "names.update(anonymous=mmap.mmap(-1, 8192), memory=os.memfd_create('trial'))",
        "os.ftruncate(memory, 8192)",
        "names.update(mapped=mmap.mmap(memory, 8192))",
        "(anonymous.write(b'anonymous'), mapped.write(b'mapped'))",
        "names.update(subprocess=__import__('subprocess'))",
        "names.update(child=subprocess.Popen(['cat'], stdin=-1, stdout=-1))",
        "(child.stdin.write(b'before\\n'), child.stdin.flush())",
    ):
        answering.ask(code)
    images_at = save(form, answering, tmp_path / "images")
    images.check(images_at)
    with closing(sandboxed.restore_program(form, images_at)) as again:
        assert again.ask("(anonymous[:9], mapped[:6])") == (b"anonymous", b"mapped")
        assert again.ask("child.stdout.readline()") == b"before\n"
        assert again.ask("child.communicate(b'after\\n')[0]") == b"after\n"
        assert again.ask("child.returncode") == 0


def test_a_port_that_the_system_chose_is_another_where_it_is_taken(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    answering.ask("names.update(other=socket.create_server(('127.0.0.1', 0)))")
    (own, fixed) = (answering.port, answering.ask("other.getsockname()[1]"))
    images_at = save(form, answering, tmp_path / "images", leave_running=True)
    assert criu.listening(images_at) == {own, fixed}
    (new,) = free_ports(1)
    running = criu.restore(form, images_at, ports={own: new}, stdout=subprocess.DEVNULL)
    with closing(SandboxedProgram(running.process, running.pid, new)) as again:
        assert again.ask("other.getsockname()[1]") not in (own, fixed, new)


def test_a_process_is_saved_after_a_transaction_that_is_open(
    form: Form, answering: SandboxedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criu, "TRANSACTION_TRIES", 1)
    answering.ask(f"exec({BEGIN.format(file=str(tmp_path / 'db'))!r}, names)")
    answering.ask("threading.Timer(0.2, database.commit).start()")
    images_at = save(form, answering, tmp_path / "images")
    assert images.in_transaction(images_at) == []
    with closing(sandboxed.restore_program(form, images_at)) as again:
        assert again.ask("list(database.execute('SELECT i FROM t'))") == [(5,)]


def test_a_process_that_was_saved_amid_a_transaction_is_saved_again(
    form: Form, answering: SandboxedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering.ask(f"exec({BEGIN.format(file=str(tmp_path / 'db'))!r}, names)")
    waits = []

    def wait(target: Target, seconds: float) -> list[str]:
        """Return at once, as if the transaction had begun after this; the second time, end it."""
        waits.append(seconds)
        if len(waits) > 1:
            answering.ask("database.commit()")
        return []

    monkeypatch.setattr(Target, "wait_for_transactions", wait)
    images_at = save(form, answering, tmp_path / "images")
    assert len(waits) == 2
    with closing(sandboxed.restore_program(form, images_at)) as again:
        assert again.ask("list(database.execute('SELECT i FROM t'))") == [(5,)]


# ---------------------------------------------------------------- what is refused


def test_a_process_amid_a_transaction_is_refused_and_continues(
    form: Form, answering: SandboxedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criu, "TRANSACTION_SECONDS", 0.05)
    answering.ask(f"exec({BEGIN.format(file=str(tmp_path / 'db'))!r}, names)")
    for leave_running in (True, False):
        with pytest.raises(
            ProcessError, match=rf"amid a transaction of the database \S*{tmp_path}/db"
        ):
            save(form, answering, tmp_path / "images", leave_running=leave_running)
        assert list((tmp_path / "images").iterdir()) == []
        assert answering.ask("list(database.execute('SELECT i FROM t'))") == [(5,)]
    answering.ask("database.commit()")
    images_at = save(form, answering, tmp_path / "images")
    with closing(sandboxed.restore_program(form, images_at)) as again:
        assert again.ask("list(database.execute('SELECT i FROM t'))") == [(5,)]


def test_a_mapped_library_that_changed_is_refused(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    import _ctypes

    library = tmp_path / "library.so"
    shutil.copy(_ctypes.__file__, library)
    mapping = "mmap.mmap(code.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | 4)"
    answering.ask(f"names.update(code=open({str(library)!r}, 'rb'))")
    answering.ask(f"names.update(mapped={mapping})")
    images_at = save(form, answering, tmp_path / "images")
    content = library.read_bytes()

    def replaced(data: bytes) -> None:
        library.unlink()
        library.write_bytes(data)

    replaced(content)
    images.check(images_at)
    with closing(sandboxed.restore_program(form, images_at)) as again:
        assert again.ask("mapped[1:4]") == b"ELF"
    replaced(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ProcessError, match=r"library\.so, which has changed"):
        images.check(images_at)
    library.unlink()
    with pytest.raises(ProcessError, match=r"library\.so, which is not there any more"):
        images.check(images_at)


def test_a_file_that_is_gone_is_named(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    file = tmp_path / "wanted"
    answering.ask(f"names.update(held=open({str(file)!r}, 'w'))")
    images_at = save(form, answering, tmp_path / "images")
    file.unlink()
    with pytest.raises(ProcessError, match="wanted open, which cannot be opened now"):
        criu.restore(form, images_at)


@pytest.mark.parametrize("name", ["core-2.img", "pages-1.img"])
def test_damaged_images_leave_nothing_behind(
    form: Form, answering: SandboxedProgram, tmp_path: Path, name: str
) -> None:
    assert commands_with(command := f"{sandboxed.PROGRAM} {answering.port} ")
    images_at = save(form, answering, tmp_path / "images")
    os.truncate(images_at / name, (images_at / name).stat().st_size // 2)
    # If a page is missing, CRIU waits forever.
    with pytest.raises(ProcessError, match="restored"):
        criu.restore(form, images_at, timeout=1.0)
    assert commands_with(command) == []


def test_another_forms_images_are_refused(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    images_at = save(form, answering, tmp_path / "images")
    other = Form("user" if form.kind == "root" else "root", form.criu)
    with pytest.raises(ProcessError, match=f"saved in the form {form.kind}"):
        criu.restore(other, images_at)


def test_ports_that_it_did_not_listen_at_are_refused(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    images_at = save(form, answering, tmp_path / "images")
    with pytest.raises(ProcessError, match="did not listen at port 1"):
        criu.restore(form, images_at, ports={1: 2})


# ---------------------------------------------------------------- what ends


def test_a_restore_that_hangs_is_given_up_without_a_trace(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    images_at = save(form, answering, tmp_path / "images")
    sleep = f"sleep 9{answering.port}"  # a command line that no other process has
    hanging = wrapper(tmp_path, form.criu, f'[ "$1" != restore ] || exec {sleep}')
    with pytest.raises(ProcessError, match="not restored within") as caught:
        criu.restore(Form(form.kind, hanging), images_at, timeout=0.5)
    assert caught.value.reason == "timeout"
    wait_until(lambda: commands_with(sleep) == [])


def test_a_hung_dump_is_cancelled_and_the_process_continues(
    form: Form, answering: SandboxedProgram, tmp_path: Path
) -> None:
    hanging = wrapper(tmp_path, form.criu, "exec sleep 86402")
    with pytest.raises(ProcessError, match="could not be saved within") as caught:
        criu.dump(
            Form(form.kind, hanging),
            answering.pid,
            tmp_path / "images",
            wake_fd=1,
            leave_running=False,
            timeout=0.5,
        )
    assert caught.value.reason == "timeout"
    assert answering.ask("1 + 1") == 2
    assert list((tmp_path / "images").iterdir()) == []


def test_a_process_continues_when_what_was_saved_cannot_be_described(
    form: Form, answering: SandboxedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path) -> list[images.Mapped]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images, "mapped_files", full)
    with pytest.raises(ProcessError, match="No space left"):
        save(form, answering, tmp_path / "images")
    assert answering.ask("1 + 1") == 2
    assert list((tmp_path / "images").iterdir()) == []


@pytest.mark.parametrize("restored", [False, True])
def test_a_launcher_that_is_killed_takes_all_with_it(
    form: Form, answering: SandboxedProgram, tmp_path: Path, *, restored: bool
) -> None:
    images_at = save(form, answering, tmp_path / "images", leave_running=not restored)
    with closing(sandboxed.restore_program(form, images_at) if restored else answering) as program:
        program.ask("names.update(child=__import__('subprocess').Popen(['sleep', '86400']))")
        with watched(program.pid) as fd:
            program.process.kill()
            assert has_ended(fd)


def test_the_lifeline_ends_all(form: Form) -> None:
    watched_fd, lifeline = os.pipe()  # the reading end is watched, the other one is held
    with closing(sandboxed.start_program(form, lifeline_fd=watched_fd)) as program:
        os.close(watched_fd)
        with watched(program.pid) as fd:
            assert program.ask("1 + 1") == 2
            os.close(lifeline)
            assert has_ended(fd)
        program.process.wait(SECONDS_MAX)


def test_processes_end_with_the_server_that_started_them(form: Form, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from kernelproxy.criu.sandbox import Form\n"
        "from tests.doubles.kernel import sandboxed\n"
        f"program = sandboxed.start_program(Form({form.kind!r}, {form.criu!r}))\n"
        "print(program.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as server:
        assert server.stdout is not None
        with watched(int(server.stdout.readline())) as fd:
            server.kill()
            assert has_ended(fd)


@pytest.mark.parametrize(("command", "status"), [("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM)])
def test_the_launcher_ends_as_the_process_does(form: Form, command: str, status: int) -> None:
    process, _ = sandboxed.launch(["sh", "-c", f"sleep 0.2; {command}"], form)
    assert process.wait(SECONDS_MAX) == status


def test_a_command_that_is_not_there_ends_with_127(form: Form) -> None:
    reader, writer = os.pipe()
    command = [*sandbox.prefix(form, writer), "/nowhere/nothing"]
    done = subprocess.run(command, pass_fds=[writer], capture_output=True, check=False)
    os.close(reader)
    os.close(writer)
    assert done.returncode == 127
    assert done.stderr == b"/nowhere/nothing: No such file or directory\n"


def test_signals_to_the_launcher_reach_the_process(form: Form) -> None:
    trap = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done"
    process, _ = sandboxed.launch(["sh", "-c", trap], form, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.wait(SECONDS_MAX) == 9


def test_a_lot_of_output_arrives_whole(form: Form) -> None:
    code = "import os; [os.write(1, b'%07d\\n' % n) for n in range(50_000)]"
    process, _ = sandboxed.launch([sys.executable, "-c", code], form, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert [int(line) for line in process.stdout] == list(range(50_000))
