"""Call collectives at random, in random groups, and compare all results with what is expected.

``random_calls.py FIRST COUNT``: seeds. Each rank makes the same choices; only members of a group
take part in its calls.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from tests.programs.collectives.expected import (
    DTYPES,
    MOVED,
    agree,
    contribution,
    ops,
    reduced,
)

CALLS = 12
# None, one, a few, more than what one exchange takes.
COUNTS = (0, 1, 6, 600, 20000)
Check = Callable[[], None]


class Program:
    """One random program."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._choices = random.Random(seed)
        self.me, self._world = distributed.get_rank(), distributed.get_world_size()
        everybody = list(range(self._world))
        subset = sorted(self._choices.sample(everybody, self._choices.randint(1, self._world)))
        self._groups: list[tuple[list[int], Any]] = [
            (everybody, distributed.group.WORLD),
            (subset, distributed.new_group(subset)),
            (everybody, distributed.new_group(everybody)),
        ]
        self._pending: list[tuple[Any, Check]] = []

    def run(self) -> None:
        kinds = sorted(name for name in dir(self) if name.startswith("call_"))
        for number in range(CALLS):
            members, group = self._choices.choice(self._groups)
            kind = self._choices.choice(kinds)
            reduces = "reduce" in kind
            dtype = self._choices.choice(DTYPES if reduces else MOVED)
            op = self._choices.choice(ops(dtype)) if reduces else None
            count, root = self._choices.choice(COUNTS), self._choices.choice(members)
            wait, async_op = self._choices.random() < 0.3, self._choices.random() < 0.5
            if self.me not in members:
                continue
            self._what = f"seed {self._seed}, call {number}: {kind} {dtype} {op} {count} {members}"
            self._key, self._dtype, self._count = (self._seed, number), dtype, count
            self._members, self._root = members, root
            self._op: Any = op
            options = {"group": group, "async_op": async_op}
            work, check = getattr(self, kind)(options)
            self._pending.append((work if async_op else None, self._named(check)))
            if wait:
                self._settle()
        self._settle()
        for _, group in self._groups[1:]:
            if group is not distributed.GroupMember.NON_GROUP_MEMBER:
                distributed.destroy_process_group(group)

    def _named(self, check: Check) -> Check:
        what = self._what

        def named() -> None:
            try:
                check()
            except AssertionError as error:
                raise AssertionError(what) from error

        return named

    def _settle(self) -> None:
        self._choices_of_order().shuffle(self._pending)
        for work, check in self._pending:
            if work is not None:
                work.wait()
            check()
        self._pending.clear()

    def _choices_of_order(self) -> random.Random:
        return random.Random(f"{self._seed} {self.me}")

    def _given(self, rank: int, part: int = 0, count: int | None = None) -> torch.Tensor:
        size = self._count if count is None else count
        return contribution((self._key, part), rank, size, self._dtype)

    def _own(self, part: int = 0) -> torch.Tensor:
        return self._given(self.me, part).cuda()

    def _empty(self, count: int | None = None) -> torch.Tensor:
        size = self._count if count is None else count
        return torch.zeros(size, dtype=self._dtype, device="cuda")

    def _all(self, part: int = 0) -> list[torch.Tensor]:
        return [self._given(rank, part) for rank in self._members]

    def call_all_reduce(self, options: dict[str, Any]) -> tuple[Any, Check]:
        x, expected = self._own(), reduced(self._all(), self._op)
        return distributed.all_reduce(x, self._op, **options), lambda: expect([x], [expected])

    def call_reduce(self, options: dict[str, Any]) -> tuple[Any, Check]:
        x, root = self._own(), self._root
        expected = reduced(self._all(), self._op) if root == self.me else x.cpu()
        return distributed.reduce(x, root, self._op, **options), lambda: expect([x], [expected])

    def call_broadcast(self, options: dict[str, Any]) -> tuple[Any, Check]:
        x, expected = self._own(), self._given(self._root)
        return distributed.broadcast(x, self._root, **options), lambda: expect([x], [expected])

    def call_all_gather(self, options: dict[str, Any]) -> tuple[Any, Check]:
        sizes = [self._count + rank for rank in self._members]
        given = [self._given(rank, count=n) for rank, n in zip(self._members, sizes, strict=True)]
        found = [self._empty(size) for size in sizes]
        x = given[self._members.index(self.me)].cuda()
        return distributed.all_gather(found, x, **options), lambda: expect(found, given)

    def call_all_gather_into_tensor(self, options: dict[str, Any]) -> tuple[Any, Check]:
        found, expected = self._empty(self._count * len(self._members)), torch.cat(self._all())
        work = distributed.all_gather_into_tensor(found, self._own(), **options)
        return work, lambda: expect([found], [expected])

    def call_reduce_scatter(self, options: dict[str, Any]) -> tuple[Any, Check]:
        mine, found = self._members.index(self.me), self._empty()
        expected = reduced(self._all(mine), self._op)
        parts = [self._own(part) for part in range(len(self._members))]
        work = distributed.reduce_scatter(found, parts, self._op, **options)
        return work, lambda: expect([found], [expected])

    def call_reduce_scatter_tensor(self, options: dict[str, Any]) -> tuple[Any, Check]:
        mine, found = self._members.index(self.me), self._empty()
        expected = reduced(self._all(mine), self._op)
        x = torch.cat([self._own(part) for part in range(len(self._members))])
        work = distributed.reduce_scatter_tensor(found, x, self._op, **options)
        return work, lambda: expect([found], [expected])

    def call_gather(self, options: dict[str, Any]) -> tuple[Any, Check]:
        is_root, expected = self._root == self.me, self._all()
        found = [self._empty() for _ in self._members] if is_root else None
        work = distributed.gather(self._own(), found, self._root, **options)
        return work, lambda: expect(found or [], expected if is_root else [])

    def call_scatter(self, options: dict[str, Any]) -> tuple[Any, Check]:
        mine, found = self._members.index(self.me), self._empty()
        expected = self._given(self._root, mine)
        is_root = self._root == self.me
        parts = [self._own(part) for part in range(len(self._members))] if is_root else None
        work = distributed.scatter(found, parts, self._root, **options)
        return work, lambda: expect([found], [expected])

    def call_all_to_all(self, options: dict[str, Any]) -> tuple[Any, Check]:
        mine = self._members.index(self.me)
        parts = [self._own(part) for part in range(len(self._members))]
        found, expected = [self._empty() for _ in parts], self._all(mine)
        work = distributed.all_to_all(found, parts, **options)
        return work, lambda: expect(found, expected)

    def call_all_to_all_single(self, options: dict[str, Any]) -> tuple[Any, Check]:
        mine, ranks = self._members.index(self.me), range(len(self._members))
        # Rank i gives rank j (i + j) rows.
        given = [mine + part for part in ranks]
        x = torch.cat([self._given(self.me, part, mine + part) for part in ranks]).cuda()
        expected = torch.cat(
            [self._given(rank, mine, i + mine) for i, rank in enumerate(self._members)]
        )
        found = self._empty(len(expected))
        work = distributed.all_to_all_single(found, x, given, given, **options)
        return work, lambda: expect([found], [expected])

    def call_ring(self, options: dict[str, Any]) -> tuple[Any, Check]:
        mine, size = self._members.index(self.me), len(self._members)
        if size == 1:
            return Works([]), lambda: None
        after, before = self._members[(mine + 1) % size], self._members[mine - 1]
        found, expected = self._empty(), self._given(before)
        group = options["group"]
        if options["async_op"]:
            swap = [
                distributed.P2POp(distributed.irecv, found, before, group),
                distributed.P2POp(distributed.isend, self._own(), after, group),
            ]
            return Works(distributed.batch_isend_irecv(swap)), lambda: expect([found], [expected])
        sent = distributed.isend(self._own(), after, group)
        distributed.recv(found, before, group)
        assert sent is not None
        sent.wait()
        return None, lambda: expect([found], [expected])


class Works:
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def expect(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert agree(one, other), (one, other)


def main() -> None:
    first, count = map(int, sys.argv[1:])
    distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
    for seed in range(first, first + count):
        Program(seed).run()
    distributed.destroy_process_group()
    print(f"{count} programs")


if __name__ == "__main__":
    main()
