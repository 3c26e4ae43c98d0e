"""Errors of asynchronous collectives."""

from __future__ import annotations

import pytest

from kernelproxy.kernel.collectives import work


def test_errors_of_a_destroyed_group_are_not_raised_by_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work, "unreported", [])
    before, now = object(), object()
    monkeypatch.setattr("torch.futures.Future", lambda devices: _Future())
    for group in (before, now):
        work.Completion([], group).settle(RuntimeError("lost"))
    work.forget(before)
    assert [group for group, _ in work.unreported] == [now]


class _Future:
    """A future of a build without devices."""

    def then(self, callback: object) -> _Future:
        return self

    def set_result(self, result: object) -> None:
        pass
