"""Sessions as a tree: children below their parents, ranks below their job."""

from __future__ import annotations

from typing import Any

from jupyter_sing.notebook import session_tree, status_text
from kernelproxy.common.protocol.views import SessionView
from tests.unit.fake_daemon import SESSION, changed


def a_session(name: str, **changes: Any) -> SessionView:
    return changed(SESSION, {"id": name, "name": name, "memory": 1 << 20, **changes})


def a_rank(number: int, size: int = 2, **changes: Any) -> SessionView:
    changes = {"id": f"r{number}", "job": "run", "rank": number, "ranks": size, **changes}
    return a_session(f"train.py rank {number}", **changes)


def shown(*sessions: SessionView) -> list[str]:
    """Return depth, name and text of each row."""
    return [
        f"{'-' * row.depth}{row.name}" + (f": {row.text}" if hasattr(row, "text") else "")
        for row in session_tree.rows(sessions)
    ]


def test_sessions_without_relations_keep_their_order() -> None:
    assert shown(a_session("b"), a_session("a")) == ["b", "a"]
    assert shown() == []


def test_a_child_follows_its_parent() -> None:
    found = shown(
        a_session("below", parent="child"), a_session("other"), a_session("child", parent="top"),
        a_session("top"),
    )  # fmt: skip
    assert found == ["other", "top", "-child", "--below"]


def test_a_child_of_an_invisible_session_is_at_the_top() -> None:
    assert shown(a_session("child", parent="of another user")) == ["child"]


def test_ranks_are_below_their_job_in_order() -> None:
    ranks = [a_rank(number, 3, device=f"cpu:{number % 2}") for number in (2, 0, 1)]
    assert shown(a_session("a"), *ranks, a_session("z")) == [
        "a", "train.py: 3 ranks on 2 devices", "-rank 0", "-rank 1", "-rank 2", "z",
    ]  # fmt: skip


def test_ranks_of_a_notebook_are_below_it() -> None:
    ranks = [a_rank(number, parent="a") for number in range(2)]
    assert shown(*ranks, a_session("a"), a_session("below", parent="r1")) == [
        "a", "-train.py: 2 ranks on 1 device", "--rank 0", "--rank 1", "---below",
    ]  # fmt: skip


def test_a_job_whose_ranks_are_not_all_there_says_so() -> None:
    assert shown(a_rank(3, 4), a_rank(1, 4))[0] == "train.py: 2 of 4 ranks on 1 device"


def test_jobs_of_two_users_and_two_notebooks_are_different_ones() -> None:
    found = shown(a_rank(0), a_rank(1, owner="bob"), a_session("a"), a_rank(0, id="x", parent="a"))
    assert found == [
        "train.py: 1 of 2 ranks on 1 device", "-rank 0",
        "train.py: 1 of 2 ranks on 1 device", "-rank 1",
        "a", "-train.py: 1 of 2 ranks on 1 device", "--rank 0",
    ]  # fmt: skip


def test_a_job_of_one_rank_is_a_session() -> None:
    assert shown(a_rank(0, 1)) == ["train.py rank 0"]


def test_the_table_of_sessions_shows_jobs() -> None:
    table = str(
        status_text.sessions_table(
            [a_session("a.ipynb", parent=""), *(a_rank(n, parent="a.ipynb") for n in range(2))]
        )
    )
    lines = [line.split("  ") for line in table.splitlines()]
    assert [[each.strip() for each in line if each.strip()][:2] for line in lines[1:]] == [
        ["a.ipynb", "a.ipynb"],
        ["train.py", "2 ranks on 1 device"],
        ["r0", "rank 0"],
        ["r1", "rank 1"],
    ]
    assert "  train.py  2 ranks on 1 device" in table
    assert "2.0 MiB" in table
    several = status_text.sessions_table([a_rank(0), a_rank(1), a_session("z", owner="bob")])
    assert several.rows[0][:4] == ("", "ada", "train.py", "2 ranks on 1 device")
