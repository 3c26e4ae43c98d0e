"""The file tracker: the journal of tracked programs, whose behavior it does not change."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelproxy.common.errors import NativeError
from kernelproxy.kernel.files import changed_files, tracker
from kernelproxy.native import libraries, tools

Run = Callable[..., None]
Track = Callable[..., set[str]]


@pytest.fixture(scope="module")
def library() -> Path:
    return tools.file_tracker()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    directory = tmp_path / "runtime"
    directory.mkdir(mode=0o700)
    journal = directory / "journal"
    journal.touch(mode=0o600)
    return journal


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Working directory of tracked programs."""
    directory = tmp_path / "here"
    directory.mkdir()
    return directory


@pytest.fixture
def environment(library: Path, journal: Path) -> dict[str, str]:
    env = dict(os.environ)
    tracker.preload(env, library)
    env[tracker.JOURNAL_VARIABLE] = str(journal)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return env


@pytest.fixture
def run(environment: dict[str, str], here: Path) -> Run:
    """Return a function that runs a Python program in `here`, tracked."""

    def run(code: str, **env: str) -> None:
        # Without the site module: only the files of the program itself count.
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import os\n{code}"],
            cwd=here,
            env={**environment, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

    return run


@pytest.fixture
def track(run: Run, journal: Path, here: Path) -> Track:
    """Return a function that runs a program and returns what it changed, relative to `here`."""

    def track(code: str, **env: str) -> set[str]:
        run(code, **env)
        return noted(journal, here)

    return track


def noted(journal: Path, here: Path) -> set[str]:
    return {os.path.relpath(path, here) for path in changed_files.changed(journal.read_bytes())}


def below(*directories: str) -> set[str]:
    """Return the paths of the test's directory `sub`, below other directories."""
    return {f"{each}{name}" for each in directories for name in ("", "/x", "/y", "/y/z")}


MAKE = "import ctypes; c, n = ctypes.CDLL(None), ctypes.create_string_buffer(b't{}'); c.{}; "
C = "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
DIR = "d = os.open('dir', os.O_RDONLY); "
STREAM = C + "c.fopen.restype = c.fopen64.restype = c.freopen.restype = ctypes.c_void_p\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("open('a', 'w').close()", {"a"}),
        ("open('old', 'a').close()", {"old"}),
        ("open('old', 'r').close()", set()),
        ("os.open('old', os.O_RDONLY | os.O_TRUNC)", {"old"}),
        ("os.open('old', os.O_RDONLY | os.O_PATH)", set()),
        (DIR + "os.open('a', os.O_CREAT | os.O_WRONLY, dir_fd=d)", {"dir/a"}),
        ("os.open('.', os.O_TMPFILE | os.O_RDWR)", set()),
        ("os.chdir('dir'); open('../dir/./../a', 'w')", {"a"}),
        ("open('link', 'w')", {"old"}),
        ("open(b'n\\xe9w\\nline', 'w')", {os.fsdecode(b"n\xe9w\nline")}),
        (C + "c.open(b'a', os.O_CREAT | os.O_WRONLY, 0o600)", {"a"}),
        (C + "c.open64(b'a', os.O_CREAT | os.O_WRONLY, 0o600)", {"a"}),
        (C + "c.__open_2(b'old', os.O_RDWR)", {"old"}),
        (C + "c.__open64_2(b'old', os.O_RDWR)", {"old"}),
        (C + "c.__openat_2(-100, b'old', os.O_RDWR)", {"old"}),
        (C + "c.__openat64_2(-100, b'old', os.O_RDWR)", {"old"}),
        (C + "c.openat64(-100, b'a', os.O_CREAT | os.O_WRONLY, 0o600)", {"a"}),
        (C + "c.creat(b'a', 0o600)", {"a"}),
        (C + "c.creat64(b'a', 0o600)", {"a"}),
        (STREAM + "c.fopen(b'a', b'w')", {"a"}),
        (STREAM + "c.fopen64(b'a', b'we')", {"a"}),
        (STREAM + "c.fopen(b'old', b'rb+')", {"old"}),
        (STREAM + "c.fopen(b'old', b'r')", set()),
        (STREAM + "c._IO_fopen(b'a', b'w')", {"a"}),
        (STREAM + "c.freopen(b'a', b'w', ctypes.c_void_p(c.fopen(b'old', b'r')))", {"a"}),
        (MAKE.format("XXXXXX", "mkstemp(n)") + "os.rename(n.value, 'a')", {"a", "t*"}),
        (MAKE.format("XXXXXX", "mkostemp64(n, 0)"), {"t*"}),
        (MAKE.format("XXXXXX.c", "mkstemps(n, 2)"), {"t*"}),
        (MAKE.format("XXXXXX.c", "mkostemps(n, 2, 0)"), {"t*"}),
        (MAKE.format("XXXXXX", "mkdtemp(n)"), {"t*"}),
        ("os.rename('old', 'a')", {"old", "a"}),
        ("os.replace('old', 'dir/in')", {"old", "dir/in"}),
        (DIR + "os.rename('in', 'a', src_dir_fd=d, dst_dir_fd=d)", {"dir/in", "dir/a"}),
        (C + "c.renameat2(-100, b'old', -100, b'dir/in', 2)", {"old", "dir/in"}),
        ("os.rename('dir/sub', 'moved')", below("dir/sub", "moved")),
        ("os.rename('dir', 'a/')", {"dir", "dir/in", "a", "a/in"} | below("dir/sub", "a/sub")),
        ("os.unlink('link')", {"link"}),
        (C + "c.remove(b'old'); c.remove(b'empty')", {"old", "empty"}),
        (DIR + "os.unlink('in', dir_fd=d)", {"dir/in"}),
        ("os.rmdir('empty/')", {"empty"}),
        ("os.mkdir('a/', 0o700); os.makedirs('a/b/c')", {"a", "a/b", "a/b/c"}),
        (DIR + "os.mkdir('a', dir_fd=d)", {"dir/a"}),
        ("os.link('old', 'a')", {"a"}),
        ("os.symlink('nowhere', 'a')", {"a"}),
        (DIR + "os.symlink('x', 'a', dir_fd=d)", {"dir/a"}),
        ("os.truncate('link', 1)", {"old"}),
        ("os.chmod('link', 0o600)", {"old"}),
        ("os.fchmod(os.open('old', os.O_RDONLY), 0o600)", {"old"}),
        ("import shutil; shutil.rmtree('dir')", {"dir", "dir/in"} | below("dir/sub")),
        ("import shutil; shutil.copy2('old', 'dir/a')", {"dir/a"}),
        # Refused calls change nothing.
        ("\ntry: os.unlink('none')\nexcept FileNotFoundError: pass", set()),
        ("\ntry: open('none/a', 'w')\nexcept FileNotFoundError: pass", set()),
        ("\ntry: os.open('old', os.O_CREAT | os.O_EXCL)\nexcept FileExistsError: pass", set()),
        # Devices, pipes and other special files are ignored.
        ("open('/dev/null', 'w'); os.mkfifo('f'); os.open('f', os.O_RDWR)", set()),
        ("os.memfd_create('m'); open('/proc/self/comm', 'w')", set()),
        # Children.
        ("import subprocess; subprocess.run(['sh', '-c', 'echo > a; cp a b; rm a'])", {"a", "b"}),
        ("os.posix_spawn('/bin/sh', ['sh', '-c', 'echo > a'], os.environ); os.wait()", {"a"}),
        ("if os.fork() == 0: open('a', 'w'); os._exit(0)\nos.wait()", {"a"}),
        ("os.execv('/bin/sh', ['sh', '-c', 'mkdir a && mv old a'])", {"a", "a/old", "old"}),
        ("os.closerange(0, 100); open('a', 'w')", {"a"}),
    ],
)  # fmt: skip
def test_changes_are_noted(track: Track, here: Path, code: str, expected: set[str]) -> None:
    (here / "dir" / "sub" / "y").mkdir(parents=True)
    (here / "empty").mkdir()
    for name in ("old", "dir/in", "dir/sub/x", "dir/sub/y/z"):
        (here / name).write_text(name)
    (here / "link").symlink_to("old")
    found = track(code)
    loose = {name for name in expected if name.endswith("*")}
    assert {"t*" if name.startswith("t") and loose else name for name in found} == expected


def test_a_program_without_a_journal_is_not_tracked(track: Track, here: Path) -> None:
    assert track("open('a', 'w')", SING_FSTRACK="") == set()
    assert track("open('b', 'w')", SING_FSTRACK="relative") == set()
    assert {path.name for path in here.iterdir()} == {"a", "b"}


def test_a_cleared_environment_ends_the_tracking(track: Track) -> None:
    code = "import subprocess; subprocess.run(['/bin/sh', '-c', 'echo > a'], env={})"
    assert track(code) == set()


@pytest.mark.parametrize("what", ["missing", "unwritable", "directory", "link"])
def test_a_journal_that_cannot_be_written_disturbs_no_process(
    run: Run, journal: Path, here: Path, tmp_path: Path, what: str
) -> None:
    journal.unlink()
    if what == "directory":
        journal.mkdir()
    elif what == "link":
        journal.symlink_to(tmp_path / "target")
        (tmp_path / "target").touch()
    elif what == "unwritable":
        shutil.rmtree(journal.parent)
    run("open('a', 'w').write('text'); os.rename('a', 'b')")
    assert (here / "b").read_text() == "text"
    assert what != "link" or (tmp_path / "target").read_bytes() == b""


def test_errno_is_that_of_the_call(run: Run, track: Track, journal: Path) -> None:
    code = C + (
        "ctypes.set_errno(77)\n"
        "assert c.open(b'a', os.O_CREAT | os.O_WRONLY, 0o600) > 0 and ctypes.get_errno() == 77\n"
        "assert c.rename(b'a', b'b') == 0 and ctypes.get_errno() == 77\n"
        "assert c.unlink(b'a') == -1 and ctypes.get_errno() == 2\n"
    )
    assert track(code) == {"a", "b"}
    journal.unlink()
    run(code)


def test_descriptors_get_the_numbers_that_they_would_have(run: Run) -> None:
    run(
        "first = os.open('a', os.O_CREAT | os.O_WRONLY)\nos.rename('a', 'b')\n"
        "assert os.open('c', os.O_CREAT | os.O_WRONLY) == first + 1\n"
        "os.close(0); assert os.open('d', os.O_CREAT | os.O_WRONLY) == 0\n"
    )


def test_a_file_only_opened_for_writing_has_not_changed(track: Track, here: Path) -> None:
    for name in ("read", "written", "mapped", "fresh"):
        (here / name).write_text(name)
        os.utime(here / name, (1e9, 1e9))
    if not keeps_times(here):
        pytest.skip("this file system's times of modification are not trusted")
    # As if it had been written a moment ago: too recently to distinguish it from another change.
    os.utime(here / "fresh", (4e9, 4e9))
    assert track(
        "import mmap\n"
        "for name in ('read', 'written', 'mapped', 'fresh'):\n"
        "    file = open(name, 'r+b')\n"
        "    if name == 'written': file.write(b'W'); file.flush()\n"
        "    if name == 'mapped': mmap.mmap(file.fileno(), 0)[0] = 65\n"
    ) == {"written", "mapped", "fresh"}
    # It was noted, so a later change of another file with that name counts.
    (here / "read").write_text("changed")
    assert "read" in track("")


def keeps_times(path: Path) -> bool:
    kind = subprocess.check_output(["stat", "-f", "-c", "%T", str(path)], text=True).strip()
    return kind in ("ext2/ext3", "xfs", "btrfs", "nfs")


def test_a_path_is_noted_once(track: Track, journal: Path) -> None:
    track(
        "for _ in range(100):\n"
        "    open('a', 'w').close(); os.rename('a', 'b'); os.mkdir('c'); os.rmdir('c')\n"
    )
    assert journal.read_bytes().count(b"\0") == 3


def test_a_file_in_the_place_of_another_one_is_noted(track: Track) -> None:
    """The new file often has the inode of the old one, and here the same relative name."""
    found = track(
        "for name in 'abcdef':\n"
        "    os.mkdir(name); os.chdir(name); open('x', 'w').close()\n"
        "    os.unlink('x'); os.chdir('..'); os.rmdir(name)\n"
    )
    assert found == {*"abcdef", *(f"{name}/x" for name in "abcdef")}


def test_retargeted_links_are_followed_each_time(track: Track, here: Path) -> None:
    assert track(
        "for name in 'abc':\n"
        "    os.mkdir(name); os.symlink(name, 'latest'); open('latest/x', 'w').close()\n"
        "    os.unlink('latest')\n"
    ) == {*"abc", "latest", "a/x", "b/x", "c/x"}  # fmt: skip


def test_threads_and_forked_children_lose_nothing(track: Track, journal: Path) -> None:
    found = track(
        "import sys, threading, subprocess\n"
        "def work(name):\n"
        "    for i in range(200):\n"
        "        open(f'{name}-{i}', 'w').close(); os.rename(f'{name}-{i}', f'{name}+{i}')\n"
        "        if i % 100 == 50:\n"
        "            subprocess.run(['/bin/sh', '-c', f'echo > {name}-sh-{i}'], check=True)\n"
        "threads = [threading.Thread(target=work, args=(f't{i}',)) for i in range(6)]\n"
        "for thread in threads: thread.start()\n"
        "pids = []\n"
        "for i in range(4):\n"
        "    if (pid := os.fork()) == 0: work(f'p{i}'); os._exit(0)\n"
        "    pids.append(pid)\n"
        "for thread in threads: thread.join()\n"
        "assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)\n"
    )
    names = [f"t{i}" for i in range(6)] + [f"p{i}" for i in range(4)]
    assert found == {
        *(f"{name}{sign}{i}" for name in names for i in range(200) for sign in "+-"),
        *(f"{name}-sh-{i}" for name in names for i in (50, 150)),
    }
    assert all(note.endswith(b"//") for note in journal.read_bytes().split(b"\0")[1:])


def test_signal_handlers_may_open_files(track: Track) -> None:
    found = track(
        "import itertools, signal, threading\n"
        "numbers, enough = itertools.count(1), False\n"
        "def handle(*_):\n"  # which may interrupt itself
        "    global enough; mine = next(numbers); open(f's{mine}', 'w').close()\n"
        "    if mine >= 20: signal.setitimer(signal.ITIMER_REAL, 0); enough = True\n"
        "signal.signal(signal.SIGALRM, handle)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
        "i = 0\n"
        "while not enough: i += 1; open(f'a{i % 50}', 'w').close()\n"
    )
    assert found >= {f"s{i}" for i in range(1, 21)}


@pytest.mark.slow
def test_more_paths_than_it_remembers_are_all_noted(track: Track, here: Path) -> None:
    found = track("for i in range(40000): os.symlink('x', str(i)); os.unlink(str(i))")
    assert found == set(map(str, range(40000)))


def test_large_directories_are_reported_as_incomplete(
    track: Track, journal: Path, here: Path
) -> None:
    deep = here / "deep"
    deep.mkdir()
    fd = os.open(deep, os.O_RDONLY)
    for _ in range(70):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    track("os.rename('deep', 'moved')")
    missing = changed_files.gaps(journal.read_bytes())
    assert [str(each.path.relative_to(here)) for each in missing] == ["deep", "moved"]


def test_renamed_trees_are_noted_whole(track: Track, here: Path) -> None:
    dice, paths = random.Random(1), [Path("tree")]
    for number in range(400):
        path = dice.choice(paths) / f"{number:03}-{'x' * dice.randrange(200)}"
        if dice.random() < 0.3 and len(path.parts) < 10:
            paths.append(path)
            (here / path).mkdir(parents=True)
        else:
            (here / path).parent.mkdir(parents=True, exist_ok=True)
            (here / path).touch()
    tree = {os.path.relpath(each, here) for each in (here / "tree").rglob("*")} | {"tree"}
    expected = tree | {f"moved{path.removeprefix('tree')}" for path in tree}
    assert track("os.rename('tree', 'moved')") == expected


def test_a_full_journal_takes_no_more(run: Run, journal: Path) -> None:
    os.truncate(journal, changed_files.JOURNAL_BYTES_MAX)
    run("open('a', 'w')")
    assert journal.stat().st_size == changed_files.JOURNAL_BYTES_MAX
    (gap,) = changed_files.gaps(b"x" * changed_files.JOURNAL_BYTES_MAX)
    assert "no longer tracked after 64.0 MiB" in str(gap)


@pytest.mark.skipif(os.getuid() != 0, reason="chroot is for root")
def test_a_changed_root_disturbs_no_process(track: Track, here: Path) -> None:
    track("os.mkdir('root'); os.chroot('root'); open('/a', 'w').write('text')")
    assert (here / "root" / "a").read_text() == "text"


def test_other_preloaded_libraries_stay(library: Path) -> None:
    env = {"LD_PRELOAD": "/one.so /two.so", "SING_FSTRACK": "/j", "SING_FSTRACK_REASON": "none"}
    tracker.preload(env, library)
    assert env["LD_PRELOAD"] == f"{library}:/one.so /two.so"
    assert env["ASAN_OPTIONS"] == "verify_asan_link_order=0"
    tracker.leave(env)
    assert env == {"LD_PRELOAD": "/one.so:/two.so"}
    env = {"LD_PRELOAD": "/one.so /two.so"}
    tracker.leave(env)
    assert env == {"LD_PRELOAD": "/one.so /two.so"}
    env = {}
    tracker.preload(env, library)
    assert env.keys() == {"LD_PRELOAD", "ASAN_OPTIONS"}
    tracker.leave(env)
    assert env == {}
    env = {"ASAN_OPTIONS": "detect_leaks=0"}
    tracker.preload(env, library)
    assert env["ASAN_OPTIONS"] == "detect_leaks=0:verify_asan_link_order=0"
    tracker.leave(env)
    assert env == {"ASAN_OPTIONS": "detect_leaks=0"}


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_instrumented_programs_start_and_are_tracked(
    environment: dict[str, str], journal: Path, here: Path, sanitizer: str
) -> None:
    source, program = here / "program.cpp", here / "program"
    source.write_text('#include <fstream>\nint main() { std::ofstream("a") << "text"; }\n')
    built = subprocess.run(
        ["g++", f"-fsanitize={sanitizer}", str(source), "-o", str(program)],
        capture_output=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"there is no {sanitizer} sanitizer")
    subprocess.run([program], cwd=here, env=environment, check=True)
    assert noted(journal, here) == {"a"}


def test_a_path_that_cannot_be_preloaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="LD_PRELOAD cannot name"):
        tracker.preload({}, tmp_path / "with a space" / "libsing_fstrack.so")


def test_the_tracker_needs_no_version_of_libc(library: Path) -> None:
    shown = subprocess.check_output(["readelf", "-dV", str(library)], text=True)
    assert "No version information" in shown
    assert {line.split("[")[1].rstrip("]") for line in shown.splitlines() if "NEEDED" in line} == {
        "libc.so.6", "libdl.so.2",
    }  # fmt: skip


def test_an_interpreter_that_loads_it_is_accepted(library: Path) -> None:
    tracker.check(sys.executable, library)


def test_other_interpreters_are_not_given_it(library: Path, tmp_path: Path) -> None:
    def script(text: str) -> str:
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    with pytest.raises(NativeError, match="does not load the file tracker"):
        tracker.check(script("echo; echo False"), library)
    with pytest.raises(NativeError, match="does not start with the file tracker: ASan"):
        tracker.check(script("echo 'ASan runtime does not come first' >&2; exit 1"), library)
    with pytest.raises(NativeError, match="could not be tried"):
        tracker.check(str(tmp_path / "none"), library)
    damaged = tmp_path / "libsing_fstrack.so"
    damaged.write_text("not a library")
    with pytest.raises(NativeError, match="does not start with the file tracker"):
        tracker.check(sys.executable, damaged)


def test_without_a_compiler_the_reason_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        tools.file_tracker(cache=tmp_path)


def test_the_tracker_is_built_once(tmp_path: Path) -> None:
    said: list[libraries.Compiling] = []
    built = tools.file_tracker(said.append, cache=tmp_path, developing=False)
    assert tools.file_tracker(said.append, cache=tmp_path, developing=False) == built
    assert {each.what for each in said} == {"the file tracker"}
    assert said[-1].done == said[-1].total
    assert [file.name for file in built.parent.iterdir()] == ["libsing_fstrack.so"]


def test_another_journal_is_followed(
    track: Track, journal: Path, here: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o600)
    changed = track(
        f"import sys; sys.dont_write_bytecode = True\n"
        f"sys.path.insert(0, {str(Path(tracker.__file__).parents[3])!r})\n"
        "from pathlib import Path; import subprocess\n"
        "from kernelproxy.kernel.files import tracker as fstrack\n"
        "open('a', 'w'); open('b', 'w')\n"
        f"fstrack.follow(Path({str(other)!r}))\n"
        "open('b', 'w'); open('c', 'w')\n"
        "subprocess.run(['touch', 'd'], check=True)"
    )
    assert changed == {"a", "b"}
    assert noted(other, here) == {"b", "c", "d"}
