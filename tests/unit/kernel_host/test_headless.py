"""The provisioner of kernels that no server starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from jupyter_sing import NO_SESSION, load_ipython_extension

ROOT = Path(__file__).parents[3]

# As Python does at its start if this package is installed.
START = (
    "import sys, site; sys.path.insert(0, {root!r}); site.addpackage({config!r}, {pth!r}, set())\n"
)
WHERE = {"root": str(ROOT), "config": str(ROOT / "jupyter-config"), "pth": "jupyter_sing.pth"}
ASK = """
from jupyter_client.provisioning import KernelProvisionerFactory
print(KernelProvisionerFactory.instance({options}).default_provisioner_name)
"""


def run(code: str, **env: str) -> list[str]:
    """Return the output of a program in an environment in which this package is installed."""
    ours = ("JUPYTER_SING_HEADLESS", "JUPYTER_DEFAULT_PROVISIONER_NAME")
    start = START.format(**WHERE)
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        env={name: value for name, value in os.environ.items() if name not in ours} | env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def asked(options: str = "", **env: str) -> str:
    """Return the provisioner's name."""
    (name,) = run(ASK.format(options=options), **env)
    return name


def test_a_kernel_without_a_server_has_ours() -> None:
    assert asked() == "sing"


@pytest.mark.parametrize(
    "no",
    [
        {"JUPYTER_SING_HEADLESS": "0"},
        {"JUPYTER_DEFAULT_PROVISIONER_NAME": "local-provisioner"},
    ],
)
def test_opting_out_yields_the_usual_provisioner(no: dict[str, str]) -> None:
    assert asked(**no) == "local-provisioner"


def test_the_configuration_of_an_application_counts() -> None:
    chosen = "Config({'KernelProvisionerFactory': {'default_provisioner_name': 'other'}})"
    configuration = "__import__('traitlets.config').config"
    application = f"{configuration}.Application(config={configuration}.{chosen})"
    assert asked(f"parent={application}") == "other"


def test_a_server_decides_by_its_extension() -> None:
    server = "__import__('jupyter_server.serverapp').serverapp.ServerApp()"
    assert asked(f"parent={server}") == "local-provisioner"


def test_processes_that_start_no_kernels_import_nothing() -> None:
    plain, ours = "import sys, site\n", START.format(**WHERE)
    imported = [
        subprocess.check_output(
            [sys.executable, "-S", "-c", start + "print(*sys.modules)"], text=True
        ).split()
        for start in (plain, ours)
    ]
    assert {*imported[1]} - {*imported[0]} == {"__future__", "kernelproxy", "kernelproxy.headless"}


def test_the_extension_without_a_session_shows_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = InteractiveShell()
    load_ipython_extension(shell)
    said = capsys.readouterr().out
    assert said == NO_SESSION + "\n"
    monkeypatch.setenv("SING_SESSION", "s1")
    load_ipython_extension(shell)
    assert capsys.readouterr().out == ""
