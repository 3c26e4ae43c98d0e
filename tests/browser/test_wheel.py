"""The wheel in an environment that has JupyterLab, and neither Node nor torch."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.conftest import SIZE
from tests.browser.lab import PICTURES, Lab, Screen, patient, write_notebook
from tests.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def run(*command: str | Path, **options: object) -> str:
    """Run a command to its end; return what it printed."""
    done = subprocess.run(
        [str(each) for each in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment into which the wheel was installed."""
    base = tmp_path_factory.mktemp("wheel")
    venv.create(base / "venv", with_pip=False)
    python = base / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "wheel", "--no-deps", "--wheel-dir", base, ROOT)
    (wheel,) = base.glob("jupyter_sing-*.whl")
    run(*pip, "install", "--quiet", "jupyterlab", wheel)
    return python.parent


def test_installed_wheel_gives_devices_to_kernels_without_a_server(installed: Path) -> None:
    asked = (
        "from jupyter_client.provisioning import KernelProvisionerFactory as Factory;"
        "print(Factory.instance().default_provisioner_name)"
    )
    names = ("PYTHON", "JUPYTER_SING_", "JUPYTER_DEFAULT_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    assert run(installed / "python", "-c", asked, env=env) == "sing\n"


def test_installed_wheel_shows_the_panels(
    installed: Path,
    browser: Browser,
    runtime_dir: Path,
    tmp_path: Path,
) -> None:
    assert not (installed / "node").exists()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env = {**kept, "PATH": str(installed)}
    listed = run(installed / "jupyter-labextension", "list", env=env)
    assert "jupyter-sing v0.1.0" in listed
    assert "enabled" in listed.partition("jupyter-sing v0.1.0")[2].splitlines()[0]
    lab = Lab(tmp_path / "lab", python=str(installed / "python"), env=env)
    write_notebook(lab.root / "plain.ipynb", "print(6 * 7)")
    screen = Screen(browser.new_context(viewport=SIZE).new_page(), lab, PICTURES)  # type: ignore[arg-type]
    try:
        screen.open("plain.ipynb")
        screen.run(0)
        patient(screen.pill).to_contain_text("CPU only")
        screen.page.get_by_role("tab", name="Running Terminals and Kernels").click()
        patient(screen.page.locator(".jp-RunningSessions")).to_contain_text("GPUs")
        assert not screen.complaints
    finally:
        screen.page.context.close()
        lab.close()
