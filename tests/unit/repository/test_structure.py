"""tools/structure.py finds what is over a limit, and this repository has no unexpected excess."""

from __future__ import annotations

import pytest

from tools.structure import Excess, findings, main, unexpected

LONG_FUNCTION = "def work() -> None:\n" + "    step()\n" * 70
LONG_CLASS = "class Engine:\n" + "    speed = 1\n" * 300
WIDE_CLASS = "class State:\n    def __init__(self) -> None:\n" + "".join(
    f"        self.part_{number} = 0\n" for number in range(21)
)
MANY_PARAMETERS = "class Parts:\n    def __init__(self, a, b, c, d, e, f, g, *, h, i): ...\n"
RECORD = "class Row:\n" + "".join(f"    field_{number}: int\n" for number in range(21))


@pytest.mark.parametrize(
    ("check", "place", "sources"),
    [
        ("modules", "kernelproxy/a.py", {"kernelproxy/a.py": "\n" * 501}),
        ("modules", "native/a.cpp", {"native/a.cpp": "\n" * 501}),
        ("modules", "tests/test_a.py", {"tests/test_a.py": "\n" * 701}),
        ("functions", "a.py:work", {"a.py": LONG_FUNCTION}),
        ("classes", "a.py:Engine", {"a.py": LONG_CLASS}),
        ("attributes", "a.py:State", {"a.py": WIDE_CLASS}),
        ("attributes", "a.py:Row", {"a.py": RECORD}),
        ("constructors", "a.py:Parts", {"a.py": MANY_PARAMETERS}),
        ("folders", "native", {f"native/part_{number}.h": "" for number in range(16)}),
        ("class-names", "Room", {"a.py": "class Room: ...", "b.py": "class Room: ..."}),
        ("doubles", "Room", {"a.py": "class Room: ...", "tests/b.py": "class Room: ..."}),
        (
            "notes",
            "Locks",
            {"a.h": "// Note [Locks]: one\n", "b.py": '"""\nNote [Locks]: two\n"""'},
        ),
    ],
)
def test_excess_is_found(check: str, place: str, sources: dict[str, str]) -> None:
    assert [(each.check, each.place) for each in findings(sources)] == [(check, place)]


@pytest.mark.parametrize(
    "sources",
    [
        {"kernelproxy/a.py": "\n" * 500, "tests/test_a.py": "\n" * 700},
        {"a.py": LONG_FUNCTION.removesuffix("    step()\n")},
        {f"native/part_{number}{end}": "" for number in range(15) for end in (".h", ".cpp")},
        {f"src/part_{number}{end}": "" for number in range(15) for end in (".ts", ".spec.ts")},
        {"tests/a.py": "class Room: ...", "tests/b.py": "class Room: ..."},
        {"a.h": "// Note [Locks]: one\n", "b.h": "// As described in Note [Locks]: two\n"},
    ],
)
def test_sources_within_the_limits_are_not_reported(sources: dict[str, str]) -> None:
    assert list(findings(sources)) == []


def test_exceptions_need_a_reason_and_a_use() -> None:
    found = [Excess("modules", "a.py", "501 lines"), Excess("modules", "b.py", "502 lines")]
    exceptions = {"modules": {"a.py": "a table", "c.py": "gone"}, "classes": {"a.py:A": "small"}}
    assert {(each.check, each.place) for each in unexpected(found, exceptions)} == {
        ("modules", "b.py"),
        ("modules", "c.py"),
        ("classes", "a.py:A"),
    }
    assert list(unexpected(found[:1], {"modules": {"a.py": " "}})) != []


def test_this_repository_has_no_unexpected_excess(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
