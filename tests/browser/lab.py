"""JupyterLab in a real browser: a server, a page, and the actions of a user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Error, Locator, Page, expect

from tests.conftest import ROOT
from tests.doubles.free_ports import free_ports

#: Longest time that any action may take on a loaded machine.
SECONDS_MAX = 120.0
#: Not under test: they send requests to hosts that tests must not reach.
_QUIET = {
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}
#: Records all states that a pill has shown, and what moves on the page without a user action.
WATCH = """
window.singStates = [];
const noteState = button => {
  const state = button.dataset.state;
  if (window.singStates.at(-1) !== state) window.singStates.push(state);
};
new MutationObserver(changes => {
  for (const { target } of changes) if (target.matches?.('.jp-SingPill-button')) noteState(target);
}).observe(document, { subtree: true, attributes: true, attributeFilter: ['data-state'] });

window.singShifts = [];
new PerformanceObserver(list => {
  for (const entry of list.getEntries()) {
    const places = entry.sources.map(source => {
      const element = source.node?.nodeType === 1 ? source.node : source.node?.parentElement;
      const path = [];
      for (let each = element; each && path.length < 12; each = each.parentElement) {
        path.push(each.className && each.className.baseVal === undefined ? each.className : '');
      }
      return path.join(' < ');
    });
    if (!entry.hadRecentInput) window.singShifts.push({ value: entry.value, places });
  }
}).observe({ type: 'layout-shift', buffered: true });
"""


class Lab:
    """A JupyterLab server in a process of its own, which can be killed and started again.

    Parameters
    ----------
    directory : Path
        Its own: notebooks are in ``notebooks``, settings beside them.
    options : str
        For the command line.
    python : str
        What has JupyterLab.
    env : mapping, optional
        In place of this process's.
    app : str
        The package whose pages are served: jupyterlab, or notebook.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
        app: str = "jupyterlab",
    ) -> None:
        self.root, self.log = directory / "notebooks", directory / "lab.log"
        self.root.mkdir(parents=True, exist_ok=True)
        settings = directory / "settings"
        for name, value in _QUIET.items():
            file = settings / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(value))
        self.token = secrets.token_hex()
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}/"
        self._command = [
            python, "-m", app, "--no-browser", "--allow-root", "--ip=127.0.0.1",
            f"--port={self.port}", "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={self.root}", *options,
        ]  # fmt: skip
        self._env = {
            **(os.environ if env is None else env),
            "JUPYTER_TOKEN": self.token,
            "JUPYTERLAB_SETTINGS_DIR": str(settings),
            "JUPYTERLAB_WORKSPACES_DIR": str(directory / "workspaces"),
        }
        self.start()

    def start(self) -> None:
        """Start the server, also after `kill`, at the same address."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        deadline, pause = time.monotonic() + SECONDS_MAX, threading.Event()
        while True:
            try:
                self.fetch("api/status")
                return
            except (OSError, ValueError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise AssertionError(self.log.read_text(errors="replace")) from None
            pause.wait(0.05)

    def fetch(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """Request JSON from the server."""
        data = json.dumps(body).encode() if body is not None else None
        if data is None and method == "POST":
            data = b""
        request = urllib.request.Request(self.url + path, method=method, data=data)
        request.add_header("Authorization", f"token {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=SECONDS_MAX) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            error.close()
            raise
        return json.loads(text) if text else None

    def sessions(self) -> list[dict[str, Any]]:
        """Return the device sessions."""
        found: list[dict[str, Any]] = self.fetch("jupyter-sing/api/sessions")
        return found

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the server with a signal."""
        self.process.send_signal(number)
        self.process.wait(timeout=SECONDS_MAX)

    def close(self) -> None:
        """Shut the server down, with all kernels."""
        deadline = time.monotonic() + SECONDS_MAX
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                self.fetch("api/shutdown", "POST")
            except urllib.error.HTTPError:
                pass  # while a kernel starts, Jupyter's server refuses
            except urllib.error.URLError:
                # It has shut down, but waits for a thread of anyio's, which is not stopped if the
                # event loop ends before the request that used it.
                return self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
        if self.process.poll() is None:
            self.kill()
            raise AssertionError(self.log.read_text(errors="replace"))
        return None


class Screen:
    """A page that shows JupyterLab, and what must not happen on it.

    Parameters
    ----------
    page : Page
    lab : Lab
    pictures : Path
        Where screenshots go.
    """

    def __init__(self, page: Page, lab: Lab, pictures: Path) -> None:
        self.page, self.lab, self._pictures = page, lab, pictures
        #: Errors in the console, and exceptions and rejections without a handler.
        self.complaints: list[str] = []
        #: Pattern of elements that move when a command is done, maybe long after the click.
        self.moving = "Toastify"
        #: Requests to our own API: method and path.
        self.requests: list[str] = []
        page.set_default_timeout(1e3 * SECONDS_MAX)
        page.on("console", lambda said: self._note(said.type, said.text, said.location))
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        page.on("request", lambda request: self._asked(request.method, request.url))
        page.add_init_script(WATCH)

    def _note(self, kind: str, text: str, where: Any) -> None:
        if kind == "error":
            self.complaints.append(f"{text} ({where.get('url', '')})")

    def _asked(self, method: str, url: str) -> None:
        if "/jupyter-sing/api/" in url:
            self.requests.append(f"{method} {url.partition('/jupyter-sing/api/')[2]}")

    def open(self, path: str = "", *, kernel: bool = True) -> None:
        """Open JupyterLab, with a notebook if a path is given."""
        where = f"lab/tree/{path}" if path else "lab"
        self.page.goto(f"{self.lab.url}{where}?token={self.lab.token}&reset")
        splash = self.page.locator("#jupyterlab-splash")
        splash.wait_for(state="detached", timeout=1e3 * SECONDS_MAX)
        if path and kernel:
            self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        """Wait until the kernel of the visible notebook is idle."""
        named = self.notebook.locator(".jp-Toolbar-kernelName", has_text="Python 3")
        named.wait_for(timeout=1e3 * SECONDS_MAX)
        idle = self.notebook.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")
        idle.wait_for(timeout=1e3 * SECONDS_MAX)

    @property
    def notebook(self) -> Locator:
        """The visible notebook."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    @property
    def pill(self) -> Locator:
        """The state of the session of the notebook's kernel."""
        return self.notebook.locator(".jp-SingPill-button")

    @property
    def popover(self) -> Locator:
        """The popover that a click on the pill opens."""
        return self.page.locator(".jp-SingPopover")

    def states(self) -> list[str]:
        """All states that pills have shown so far, each at its change."""
        found: list[str] = self.page.evaluate("window.singStates")
        return found

    def await_state(self, *states: str) -> None:
        """Wait until the pill of the visible notebook shows one of the given states."""
        names = ", ".join(f".jp-SingPill-button[data-state={each}]" for each in states)
        self.notebook.locator(f":is({names})").wait_for(timeout=1e3 * SECONDS_MAX)

    def cell(self, number: int) -> Locator:
        """One of its code cells, from 0."""
        return self.notebook.locator(".jp-CodeCell").nth(number)

    def type_cell(self, code: str) -> None:
        """Write code into the last cell, which is empty."""
        editor = self.notebook.locator(".jp-CodeCell").last.locator(".cm-content")
        editor.click()
        self.page.keyboard.insert_text(code)

    def run(self, number: int, *, wait: bool = True) -> None:
        """Run a code cell, and wait until it has run."""
        cell = self.cell(number)
        cell.locator(".jp-InputPrompt").click()
        self.page.keyboard.press("Shift+Enter")
        if wait:
            self.finish(number)

    def finish(self, number: int) -> None:
        """Wait until a cell that was run has finished."""
        prompt = self.cell(number).locator(".jp-InputArea-prompt")
        patient(prompt).to_have_text(re.compile(r"\[\d+\]:"))

    def command(self, label: str) -> None:
        """Choose a command from the palette."""
        self.page.keyboard.press("Control+Shift+C")
        self.page.locator(".lm-CommandPalette-input:visible").fill(label)
        self.page.locator(".lm-CommandPalette-item:visible", has_text=label).first.click()

    def forgive(self, pattern: str) -> None:
        """Ignore the errors that JupyterLab itself logs while its server is down."""
        self.complaints = [each for each in self.complaints if not re.search(pattern, each)]

    def show(self, name: str) -> None:
        """Make a screenshot."""
        self._pictures.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self._pictures / f"{name}.png")

    def shifts(self) -> list[dict[str, Any]]:
        """Return which of our elements moved.

        JupyterLab moves a kernel's name and state, and notifications when another one ends.
        """
        try:
            found: list[dict[str, Any]] = self.page.evaluate("window.singShifts")
        except Error:
            return []
        ours = re.compile(rf"(?!.*({self.moving})).*jp-Sing")
        return [each for each in found if any(map(ours.match, each["places"]))]


def write_notebook(path: Path, *cells: str) -> None:
    """Write a notebook of code cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(each) for each in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}},
    )
    nbformat.write(book, path)


def patient(locator: Locator) -> Any:
    """Expect something of an element, now or later."""
    expect.set_options(timeout=1e3 * SECONDS_MAX)
    return expect(locator)


PICTURES = ROOT / "test-results" / "pictures"
