"""Reductions in the canonical order."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproxy.kernel.collectives.tree import OPERATIONS, Reduction, pieces, split

SUM = Reduction("SUM")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def numbers(seed: int, ranks: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(count, generator=generator) * 10).to(dtype) for _ in range(ranks)]


def copies(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.clone() for part in parts]


def test_tree_is_balanced_and_in_the_order_of_ranks() -> None:
    assert [split(count) for count in range(2, 10)] == [1, 2, 2, 4, 4, 4, 4, 8]
    a, b, c, d, e = parts = numbers(0, 5, 1000, torch.float32)
    expected = ((a + b) + (c + d)) + e
    assert torch.equal(SUM.combine(copies(parts), 0), expected)
    other = (((a + b) + c) + d) + e
    assert not torch.equal(other, expected)  # the order matters for these numbers


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.lists(st.integers(0, 300), max_size=4),
    st.sampled_from(FLOATS),
    st.sampled_from(["SUM", "AVG", "PRODUCT", "MIN", "MAX"]),
)
def test_result_does_not_depend_on_how_tensors_are_cut(
    seed: int, ranks: int, cuts: list[int], dtype: torch.dtype, name: str
) -> None:
    parts = numbers(seed, ranks, 300, dtype)
    whole = Reduction(name).combine(copies(parts), 0)
    bounds = [0, *sorted(cuts), 300]
    cut = [
        Reduction(name).combine([part[begin:end].clone() for part in parts], 0)
        for begin, end in itertools.pairwise(bounds)
    ]
    assert torch.equal(torch.cat(cut).view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_reduced_exactly(ranks: int, dtype: torch.dtype) -> None:
    parts = numbers(ranks, ranks, 100, dtype)
    functions = {
        "SUM": operator.add,
        "PRODUCT": operator.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": operator.and_,
        "BOR": operator.or_,
        "BXOR": operator.xor,
    }
    for name, function in functions.items():
        expected = functools.reduce(function, copies(parts))
        assert torch.equal(Reduction(name).combine(copies(parts), 0), expected), name
    total = functools.reduce(operator.add, copies(parts))
    expected = total.div(ranks, rounding_mode="trunc")
    assert torch.equal(Reduction("AVG").combine(copies(parts), 0), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_each_sum_of_eight_bit_floats_is_rounded(dtype: torch.dtype) -> None:
    a, b, c = parts = numbers(1, 3, 50, dtype)
    pair = (a.float() + b.float()).to(dtype)
    expected = (pair.float() + c.float()).to(dtype)
    assert torch.equal(SUM.combine(copies(parts), 0).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("BAND", torch.float32, "needs integers"),
        ("MAX", torch.complex64, "not defined"),
        ("AVG", torch.bool, "not defined"),
        ("SUM", torch.uint32, "cannot be reduced"),
        ("PREMUL_SUM", torch.int32, "not defined"),
    ],
)
def test_undefined_reductions_have_a_problem(name: str, dtype: torch.dtype, words: str) -> None:
    assert words in str(Reduction(name).problem(dtype))


def test_contributions_are_multiplied_before_they_are_summed() -> None:
    reduction = Reduction("PREMUL_SUM", 0.5)
    parts = [reduction.contribution(torch.full((3,), float(rank))) for rank in range(3)]
    assert torch.equal(reduction.combine(parts, 0), torch.full((3,), 1.5))


def test_operations_have_the_numbers_of_torch() -> None:
    kinds = torch.distributed.ReduceOp.RedOpType
    assert [int(getattr(kinds, name)) for name in OPERATIONS] == list(range(len(OPERATIONS)))


@given(st.integers(0, 5000), st.integers(1, 9))
def test_pieces_cover_a_tensor_once(count: int, ranks: int) -> None:
    found = pieces(count, ranks)
    assert len(found) == ranks
    assert [i for piece in found for i in range(count)[piece]] == list(range(count))
    assert max(len(range(count)[piece]) for piece in found) <= count // ranks + 64
