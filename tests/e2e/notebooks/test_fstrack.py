"""The files that a real kernel changes in the usual ways are in its journal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernelproxy.common import paths
from kernelproxy.kernel.files import changed_files
from tests.e2e.kernels import Kernel, kernel

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CELLS = {
    "open('open.txt', 'w').write('text')": {"open.txt"},
    "with open('theirs.log', 'a') as f: print('line', file=f)": {"theirs.log"},
    "open('theirs.csv').read()": set(),
    "Path('pathlib.txt').write_text('text'); Path('touched').touch()": {"pathlib.txt", "touched"},
    "with open('a.csv', 'w', newline='') as f: csv.writer(f).writerow([1, 2])": {"a.csv"},
    "json.dump({}, open('a.json', 'w')); pickle.dump({}, open('a.pickle', 'wb'))": {
        "a.json", "a.pickle",
    },
    "np.save('a.npy', np.ones(3)); np.savez('b.npz', a=np.ones(3))": {"a.npy", "b.npz"},
    "np.ones(3).tofile('a.bin'); np.memmap('c.mm', 'u1', 'w+', shape=3)[:] = 1": {"a.bin", "c.mm"},
    "torch.save({'w': torch.ones(3)}, 'model.pt')": {"model.pt"},
    "torch.save(torch.ones(3, device='cuda'), 'device.pt.tmp')\n"
    "os.replace('device.pt.tmp', 'device.pt')": {"device.pt.tmp", "device.pt"},
    "db = sqlite3.connect('a.db'); db.execute('create table t (x)'); db.commit(); db.close()": {
        "a.db", "a.db-journal",
    },
    "shutil.copy('open.txt', 'copy.txt'); shutil.copytree('tree', 'tree2')": {
        "copy.txt", "tree2", "tree2/leaf",
    },
    "os.rename('copy.txt', 'renamed.txt')": {"copy.txt", "renamed.txt"},
    "shutil.move('tree2', 'tree3')": {"tree2", "tree2/leaf", "tree3", "tree3/leaf"},
    "shutil.rmtree('tree3')": {"tree3", "tree3/leaf"},
    "os.makedirs('made/deep'); os.symlink('open.txt', 'link')": {"made", "made/deep", "link"},
    "os.chmod('theirs.sh', 0o755)": {"theirs.sh"},
    "subprocess.run(['sh', '-c', 'echo > shell; mv shell moved'], check=True)": {"shell", "moved"},
    "!echo bang > bang.txt && gzip bang.txt": {"bang.txt", "bang.txt.gz"},
    "%%bash\ncat > bash.txt <<< text; rm bash.txt": {"bash.txt"},
    "%%writefile cell.py\nimport os": {"cell.py"},
    "process = multiprocessing.get_context('fork').Process(target=write, args=('forked',))\n"
    "process.start(); process.join()": {"forked"},
    "process = multiprocessing.get_context('spawn').Process(target=os.mkdir, args=('spawned',))\n"
    "process.start(); process.join()": {"spawned"},
    "thread = threading.Thread(target=write, args=('threaded',)); thread.start(); thread.join()": {
        "threaded",
    },
    "with zipfile.ZipFile('a.zip', 'w') as z: z.writestr('in', 'text')\n"
    "shutil.unpack_archive('a.zip', 'unpacked')": {"a.zip", "unpacked", "unpacked/in"},
    "os.unlink('theirs.gone')": {"theirs.gone"},
    "f = tempfile.NamedTemporaryFile(dir='.', prefix='temp', delete=False)": {"temp*"},
    "os.chdir('made'); open('../made/deep/./../x', 'w').close(); os.chdir('..')": {"made/x"},
}  # fmt: skip

IMPORTS = (
    "import csv, json, multiprocessing, os, pickle, shutil, sqlite3, subprocess, tempfile\n"
    "import threading, zipfile, numpy as np, torch\nfrom pathlib import Path\n"
    "def write(name):\n    with open(name, 'w') as f: f.write('text')\n"
)


@pytest.fixture
def notebook_directory(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    directory = tmp_path / "notebooks"
    (directory / "tree").mkdir(parents=True)
    for name in ("log", "csv", "gone", "sh"):
        (directory / f"theirs.{name}").write_text("theirs")
    (directory / "tree" / "leaf").write_text("leaf")
    monkeypatch.chdir(directory)
    return directory


def journal_of(notebook: Kernel) -> Path:
    return paths.journal_path(str(notebook.manager.kernel_id))


def noted(notebook: Kernel, directory: Path) -> set[str]:
    """Return what the notebook has changed, relative to its directory, without what is excluded."""
    # Tests run below the temporary directory, where removed files would not be counted.
    limits = changed_files.FileLimits(temporary=())
    collected = changed_files.collect(
        changed_files.changed(journal_of(notebook).read_bytes()), limits
    )
    assert collected.skipped == []
    inside = {state.path for state in collected.states if state.path.is_relative_to(directory)}
    outside = {state for state in collected.states if state.path not in inside}
    assert {state.path for state in outside if state.kind != changed_files.PathKind.ABSENT} == set()
    return {os.path.relpath(path, directory) for path in inside}


def test_journal_has_exactly_the_changed_files(notebook_directory: Path) -> None:
    with kernel() as notebook:
        assert notebook.run(IMPORTS).error == ""
        seen = noted(notebook, notebook_directory)
        assert seen == set()
        for cell, expected in CELLS.items():
            ran = notebook.run(cell)
            assert (ran.error, ran.error_text) == ("", ""), cell
            now = noted(notebook, notebook_directory)
            new = {"temp*" if name.startswith("temp") else name for name in now - seen}
            assert new == {name for name in expected if name not in seen}, cell
            seen = now
        journal = journal_of(notebook)
        notebook.restart()
        notebook.run("open('later', 'w').close()")
        assert noted(notebook, notebook_directory) == seen | {"later"}
    assert not journal.exists()
    assert (notebook_directory / "theirs.csv").read_text() == "theirs"


def test_tracker_prints_nothing_in_children_of_a_kernel(notebook_directory: Path) -> None:
    with kernel() as notebook:
        ran = notebook.run(
            "import subprocess, sys\n"
            "for command in (['true'], [sys.executable, '-c', ''], ['sh', '-c', 'ls | cat']):\n"
            "    print(subprocess.run(command, capture_output=True).stderr)\n"
        )
        assert (ran.stdout, ran.stderr) == ("b''\n" * 3, "")
