"""Kernels of environments that are not ours: proxied if possible, else unchanged."""

from __future__ import annotations

import json
import re
import sysconfig
import venv
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import SessionReply, Suspend
from tests.doubles.session.pids import existing
from tests.e2e.kernels import Kernel, kernel, wait_for_session
from tests.integration.conftest import kill_at_once, parent_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SITE = Path(sysconfig.get_paths()["purelib"])
# Our own packages, or packages that we need but a kernel does not.
NOT_THERE = re.compile(
    r"(jupyter_sing|kernelproxy|_jupyter_sing|__editable__|_editable|jupyter_server|jupyter_events"
    r"|prometheus_client|pynvml|ipywidgets|blake3|zstandard|cloudpickle|distutils-precedence"
    r"|_?yaml|(?i:pyyaml)"
    r"|torch(?!gen)).*"
)


class Environment:
    """Virtual environment with ipykernel and links to all other packages here except our own."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = directory / "bin" / "python"
        self.site = next(directory.glob("lib/python3*/site-packages"))
        for entry in SITE.iterdir():
            if not NOT_THERE.fullmatch(entry.name):
                (self.site / entry.name).symlink_to(entry)

    def install_as(self, name: str) -> None:
        """Make it the environment of the kernel `name`."""
        spec = {
            "argv": [str(self.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
        }
        directory = Path(KernelSpecManager().user_kernel_dir) / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "kernel.json").write_text(json.dumps(spec))


@pytest.fixture
def environment(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)  # away from the sources
    environment = Environment(tmp_path / "foreign")
    environment.install_as("foreign")
    return environment


def link_torch(environment: Environment) -> None:
    for entry in SITE.glob("torch*"):
        if not (environment.site / entry.name).exists():
            (environment.site / entry.name).symlink_to(entry)


def is_ordinary(notebook: Kernel) -> bool:
    ran = notebook.run(
        "import os, sys\n"
        "print([n for n in sys.modules if n.startswith('kernelproxy')],\n"
        "      [n for n in os.environ if n.startswith('SING_')])"
    )
    return ran.stdout == "[] []\n" and ran.stderr == ""


def test_environment_with_torch_alone_is_proxied(environment: Environment) -> None:
    link_torch(environment)
    with kernel("foreign") as notebook:
        ran = notebook.run("import importlib.util as u; print(u.find_spec('prometheus_client'))")
        assert ran.stdout == "None\n"
        ran = notebook.run(
            "import sys, torch\n"
            "x = torch.ones(3, device='cuda', requires_grad=True)\n"
            "(x * 2).sum().backward()\n"
            "print(sys.prefix, x.grad.tolist())"
        )
        assert (ran.error_text, ran.stderr) == ("", "")
        assert ran.stdout == f"{environment.python.parents[1]} [2.0, 2.0, 2.0]\n"
        assert "%sing suspend" in notebook.run("%sing help").stdout
        # Processes that it starts must not find our packages.
        ran = notebook.run(
            "import subprocess\n"
            "print(subprocess.run([sys.executable, '-c', 'import kernelproxy'],"
            " capture_output=True, text=True).stderr)"
        )
        assert "No module named 'kernelproxy'" in ran.stdout


def test_notebook_of_another_environment_is_saved_and_restored(environment: Environment) -> None:
    link_torch(environment)
    with kernel("foreign") as notebook:
        setup = "import torch\nt = torch.ones(5000, device='cuda')\ntotal = lambda: t.sum().item()"
        assert notebook.run(setup).stderr == ""
        ran = notebook.run("%sing checkpoint mine")
        assert (ran.stderr, ran.stdout.split(":")[0]) == ("", "Saved checkpoint mine")
        notebook.run("del t, total")
        assert notebook.run("%sing restore mine").stderr == ""
        assert notebook.run("print(total())").stdout == "5000.0\n"


def test_environment_without_torch_is_not_changed(environment: Environment) -> None:
    with kernel("foreign") as notebook:
        assert is_ordinary(notebook)


def test_unsupported_torch_is_imported_unchanged_with_one_line(environment: Environment) -> None:
    torch = environment.site / "torch"
    torch.mkdir()
    (torch / "version.py").write_text("__version__ = '2.4.0'\n")
    (torch / "__init__.py").write_text("from .version import __version__\n")
    with kernel("foreign") as notebook:
        assert notebook.run("print(1)").stderr == ""  # torch is not imported yet
        ran = notebook.run("import torch; print(torch.__version__, torch.__file__)")
        assert ran.stdout == f"2.4.0 {torch / '__init__.py'}\n"
        assert ran.stderr.startswith("jupyter_sing: CPU only: torch 2.4.0 is not supported")
        assert ran.stderr.count("\n") == 1


def test_torch_without_a_compiler_is_imported_unchanged_with_one_line(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link_torch(environment)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with kernel("foreign") as notebook:
        ran = notebook.run("import torch; print(torch.cuda.is_available(), torch.ones(2).sum())")
        assert ran.stdout == "False tensor(2.)\n"
        assert ran.stderr.startswith("jupyter_sing: CPU only: there is no C++ compiler")
        assert ran.stderr.count("\n") == 1


def test_damaged_installation_does_not_break_kernels(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link_torch(environment)
    broken = tmp_path / "broken"
    (broken / "kernelproxy").mkdir(parents=True)
    (broken / "kernelproxy" / "__init__.py").write_text("raise RuntimeError('damaged')\n")
    monkeypatch.setattr("kernelproxy.common.paths.bundle_dir", lambda: broken)
    with kernel("foreign") as notebook:
        ran = notebook.run("import torch; print(torch.ones(2).sum(), torch.cuda.is_available())")
        assert ran.stdout == "tensor(2.) False\n"


def test_wait_for_a_worker_that_cannot_start_is_interrupted_without_loss(
    environment: Environment,
) -> None:
    link_torch(environment)
    with kernel("foreign") as notebook:
        notebook.run("import torch\na = torch.ones(3, device='cuda')\na.tolist()")
        session = wait_for_session(lambda found: found["worker_pid"] is not None)
        zygote = parent_of(existing(session["worker_pid"]))
        with agent_client.connect(start=False) as connection:
            connection.expect(SessionReply, Suspend(session["id"]))
        torch = environment.site / "torch"
        torch.rename(torch.with_name("away"))
        kill_at_once(zygote)
        cell = notebook.begin("print('here', flush=True)\nfor _ in range(3): print(a.sum().item())")
        waits = wait_for_session(lambda found: "could not be started" in found["reason"])
        assert "this environment has no torch. Nothing is lost." in waits["reason"]
        notebook.manager.interrupt_kernel()
        ran = notebook.finish(cell)
        assert (ran.stdout, ran.error) == ("here\n", "KeyboardInterrupt")
        torch.with_name("away").rename(torch)
        assert notebook.run("print(a.tolist())").stdout == "[1.0, 1.0, 1.0]\n"
