"""The table of options, and the places that must agree with it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from jupyter_sing.cli import doctor
from jupyter_sing.server.extension import SingExtension
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.common import options
from kernelproxy.common.errors import ControlError
from kernelproxy.common.options import (
    DETERMINISTIC,
    DIRECT_GPU,
    OPTIONS,
    Kind,
    Option,
    Reader,
    options_of,
)
from kernelproxy.provisioning.provisioner import SingProvisioner
from tools import settings_page

ROOT = Path(__file__).resolve().parents[3]
WITH_VARIABLE = [each for each in OPTIONS if each.has_variable]
#: Variables of the build, which is no part of the package.
OF_BUILD = {"JUPYTER_SING_TORCH_DIRS"}

log = logging.getLogger(__name__)


@pytest.mark.parametrize(
    ("owner", "reader"), [(SingExtension, Reader.SERVER), (SingProvisioner, Reader.PROVISIONER)]
)
def test_traits_are_the_options_of_the_table(owner: type, reader: Reader) -> None:
    found = owner.class_own_traits(config=True)  # type: ignore[attr-defined]
    assert set(found) == {each.name for each in options_of(reader)}
    for option in options_of(reader):
        assert option.help in found[option.name].help
        assert not option.has_variable or option.variable in found[option.name].help


@pytest.mark.parametrize("option", options_of(Reader.PROVISIONER), ids=lambda each: each.name)
def test_traits_of_the_provisioner_have_the_defaults_of_the_table(
    option: Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(option.variable, raising=False)
    usual = None if option is options.IDLE_TIMEOUT else option.default
    assert getattr(SingProvisioner(), option.name) == usual


def test_traits_read_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in [
        ("IDLE_TIMEOUT", "7.5"), ("CHECKPOINT_CELLS", "20"), ("TRACK_FILES", "off"),
        ("HOST_MEMORY", "4GiB"),
    ]:  # fmt: skip
        monkeypatch.setenv(f"JUPYTER_SING_{name}", text)
    assert SingProvisioner().idle_timeout == SingExtension().idle_timeout == 7.5
    assert SingProvisioner().checkpoint_cells == 20
    assert SingProvisioner().track_files is False
    assert SingExtension().host_memory == "4GiB"
    assert SingProvisioner(idle_timeout=1.0).idle_timeout == 1.0


@pytest.mark.parametrize("text", ["soon", "nan", "inf"])
def test_traits_ignore_invalid_variables_with_a_warning(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUPYTER_SING_KEEP_KERNELS", text)
    assert options.KEEP_KERNELS.read_or(86400.0, log) == 86400.0
    assert f"JUPYTER_SING_KEEP_KERNELS is '{text}'" in caplog.text


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        (options.LINGER, "soon", "'soon': not a number of seconds. Write a number, such as 600."),
        (options.LINGER, "", "'': not a number of seconds. Write a number, such as 600."),
        (options.CHECKPOINT_KEEP, "inf", "'inf': not a number. Write a number, such as 3."),
        (
            options.DISK_QUOTA, "much",
            "'much': not a size. Write 4GiB, 512MiB or a number of bytes.",
        ),
    ],
)  # fmt: skip
def test_errors_name_variable_value_and_what_is_allowed(
    option: Option, text: str, message: str
) -> None:
    with pytest.raises(ControlError) as error:
        option.read({option.variable: text})
    assert str(error.value) == f"{option.variable} is {message}"
    assert error.value.reason == "bad-request"


def test_settings_of_the_daemon_are_options_of_the_table() -> None:
    found = AgentSettings.from_environment(
        {
            "JUPYTER_SING_IDLE_TIMEOUT": "5", "JUPYTER_SING_LINGER": "inf",
            "JUPYTER_SING_HOST_MEMORY": "1.5GiB", "JUPYTER_SING_COLD_AFTER": "0",
        }
    )  # fmt: skip
    assert (found.idle_timeout, found.host_memory, found.cold_after) == (5.0, 3 << 29, 0.0)
    assert found.linger > 1e18
    assert found.disk_quota == AgentSettings().disk_quota == 64 << 30
    assert AgentSettings.from_environment({}) == AgentSettings()


def test_switches_are_on_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = [each for each in OPTIONS if each.kind is Kind.SWITCH]
    assert switches
    for option in switches:
        # Except for what is seldom wanted.
        assert option.read({}) is (option not in (DIRECT_GPU, DETERMINISTIC))
        monkeypatch.setenv(option.variable, "")
        assert option.is_on() is option.default
        assert option.read({option.variable: "1"}) is True
        assert not any(option.read({option.variable: text}) for text in ("0", "No", " off "))


def test_page_of_settings_has_the_table() -> None:
    text = settings_page.PAGE.read_text("utf-8")
    assert settings_page.page(text) == text, "python tools/settings_page.py"


def test_no_other_variable_is_mentioned() -> None:
    known = {each.variable for each in WITH_VARIABLE} | OF_BUILD
    files = [
        *(ROOT / "jupyter_sing").rglob("*.py"), *(ROOT / "kernelproxy").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md",
    ]  # fmt: skip
    mentioned = {
        found
        for file in files
        for found in re.findall(r"JUPYTER_SING_[A-Z_]*[A-Z]", file.read_text("utf-8"))
    }
    assert mentioned - known == set()


def test_doctor_reports_settings_that_are_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each.variable for each in WITH_VARIABLE]:
        monkeypatch.delenv(name, raising=False)
    assert list(doctor._settings()) == []
    monkeypatch.setenv("JUPYTER_SING_IDLE_TIMEOUT", "soon")
    monkeypatch.setenv("JUPYTER_SING_IDEL_TIMEOUT", "5")
    findings = [(each.state, each.text.split(" is ")[0]) for each in doctor._settings()]
    assert findings == [
        ("missing", "JUPYTER_SING_IDEL_TIMEOUT"),
        ("broken", "JUPYTER_SING_IDLE_TIMEOUT"),
    ]
