"""Memory that control groups limit, by files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproxy.agent import control_groups
from kernelproxy.agent.control_groups import memory_left, memory_limit
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.spill import host_memory

MIB = 1 << 20


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("_", ".", 1)).write_text(text)


def belong_to(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(control_groups, "_groups_of", lambda pid: text)


def test_no_group_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "0::/\n", "0::/a/b\n4:memory:/c\n", "junk\n"):
        belong_to(monkeypatch, text)
        assert (memory_limit(tmp_path), memory_left(tmp_path)) == (None, None)


def test_the_smallest_limit_of_all_groups_above_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    belong_to(monkeypatch, "0::/pod/container\n")
    pod, container = tmp_path / "pod", tmp_path / "pod" / "container"
    stat = f"anon 1\ninactive_file {5 * MIB}\nactive_file {7 * MIB}\n"
    write(container, memory_max="max\n", memory_current=f"{30 * MIB}\n", memory_stat=stat)
    assert memory_limit(tmp_path) is None
    write(pod, memory_max=f"{100 * MIB}\n", memory_current=f"{60 * MIB}\n", memory_stat=stat)
    assert memory_limit(tmp_path) == 100 * MIB
    assert memory_left(tmp_path) == 45 * MIB  # cached files can be dropped
    write(container, memory_max=f"{32 * MIB}\n")
    assert (memory_limit(tmp_path), memory_left(tmp_path)) == (32 * MIB, 7 * MIB)
    write(container, memory_current=f"{50 * MIB}\n")  # the limit was lowered
    assert memory_left(tmp_path) == 0


def test_a_containers_own_group_is_the_root_of_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    belong_to(monkeypatch, "0::/\n")
    write(tmp_path, memory_max="500\n", memory_current="100\n")
    assert (memory_limit(tmp_path), memory_left(tmp_path)) == (500, 400)


def test_groups_of_version_1_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    belong_to(monkeypatch, "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n")
    names = {"memory_limit_in_bytes": "900\n", "memory_usage_in_bytes": "300\n"}
    stat = "inactive_file 1\ntotal_inactive_file 50\n"
    write(tmp_path / "memory" / "docker" / "1", **names, memory_stat=stat)
    assert (memory_limit(tmp_path), memory_left(tmp_path)) == (900, 650)


def test_host_memory_is_what_the_container_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "memory_left", lambda: 3 * MIB)
    assert host_memory.available() == 3 * MIB
    monkeypatch.setattr(host_memory, "memory_left", lambda: None)
    assert host_memory.available() > 3 * MIB
    monkeypatch.setattr("kernelproxy.agent.settings.memory_limit", lambda: 8 * MIB)
    assert AgentSettings().host_budget() == 4 * MIB
