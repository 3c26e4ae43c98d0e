"""Fixtures: a browser, and JupyterLab in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.lab import PICTURES, Lab, Screen
from tests.conftest import ROOT

SIZE = {"width": 1440, "height": 900}
TWO = "cpu:1GiB@1,cpu:1GiB@1"
#: Requests to other hosts than the page's are blocked.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return Debian's Chromium; one per module, as it has an event loop running in this thread."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("chromium is needed (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=[*FLAGS])


def find_labextension(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Let JupyterLab find what was built from this tree, as Python finds this tree's packages."""
    link = directory / "labextensions" / "jupyter-sing"
    link.parent.mkdir(parents=True)
    link.symlink_to(ROOT / "jupyter_sing" / "labextension")
    patch.setenv("JUPYTER_PATH", str(directory))


@pytest.fixture
def lab(
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Lab]:
    """A server with two small software devices; a test may give it options, and other devices.

    A module may name another package than JupyterLab as its ``APP``.
    """
    devices, *options = getattr(request, "param", (TWO,))
    monkeypatch.setenv("JUPYTER_SING_DEVICES", devices)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    find_labextension(tmp_path / "share", monkeypatch)
    one = Lab(tmp_path / "lab", *options, app=getattr(request.module, "APP", "jupyterlab"))
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def open_screen(browser: Browser, lab: Lab) -> Iterator[Callable[[], Screen]]:
    """Return a function that opens a page; at the end no page may have logged errors or moved."""
    screens: list[Screen] = []

    def open_one() -> Screen:
        page = browser.new_context(viewport=SIZE, reduced_motion="reduce").new_page()  # type: ignore[arg-type]
        screens.append(Screen(page, lab, PICTURES))
        return screens[-1]

    try:
        yield open_one
        shifts = [each for screen in screens for each in screen.shifts()]
        complaints = [each for screen in screens for each in screen.complaints]
    finally:
        for number, screen in enumerate(screens):
            screen.show(f"last-{number}")
            screen.page.context.close()
    assert not complaints
    assert not shifts


@pytest.fixture
def screen(open_screen: Callable[[], Screen]) -> Screen:
    """Open one page."""
    return open_screen()
