"""Generators of random numbers."""

from __future__ import annotations

import torch

from tests.surface.checking import check, refused


@check
def seeds_and_generators() -> None:
    torch.manual_seed(5)
    first = torch.rand(4, device="cuda").tolist()
    state = torch.cuda.get_rng_state()
    second = torch.rand(4, device="cuda").tolist()
    assert first != second
    torch.cuda.set_rng_state(state)
    assert torch.rand(4, device="cuda").tolist() == second
    torch.cuda.manual_seed_all(5)
    assert torch.cuda.initial_seed() == 5
    assert torch.rand(4, device="cuda").tolist() == first
    with torch.random.fork_rng():
        torch.rand(4, device="cuda")
    assert torch.rand(4, device="cuda").tolist() == second
    own = torch.Generator("cuda").manual_seed(5)
    assert torch.rand(4, generator=own, device="cuda").tolist() == first
    assert len(torch.cuda.get_rng_state_all()) == len(torch.cuda.default_generators) == 1


@check
def generators_are_cloned_and_have_states_of_their_own() -> None:
    own = torch.Generator("cuda").manual_seed(11)
    torch.rand(3, generator=own, device="cuda")
    other = own.clone_state()
    assert torch.equal(own.get_state(), other.get_state())
    assert (
        torch.rand(3, generator=own, device="cuda").tolist()
        == torch.rand(3, generator=other, device="cuda").tolist()
    )
    assert own.device == torch.device("cuda", 0)
    assert own.initial_seed() == 11
    assert own.seed() == own.initial_seed() != 11
    if own.get_state().numel() == 16:  # a GPU's: seed and offset
        own.set_offset(own.get_offset() + 4)
    else:
        assert "does not use offset" in refused(own.get_offset)
    assert "RNG state" in refused(lambda: own.set_state(torch.zeros(3)), TypeError)
    refused(lambda: torch.cuda.set_rng_state(torch.zeros(3, dtype=torch.uint8)))


@check
def a_fork_of_the_random_streams_leaves_them_alone() -> None:
    torch.cuda.manual_seed(1)
    states = torch.cuda.get_rng_state_all()
    for keywords in ({}, {"devices": [0]}, {"devices": ["cuda:0"], "device_type": "cuda"}):
        with torch.random.fork_rng(**keywords):
            torch.manual_seed(99)
            torch.rand(10, device="cuda")
        assert torch.equal(torch.cuda.get_rng_state_all()[0], states[0])
    torch.cuda.seed_all()
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.cuda.get_rng_state("cuda:0"), states[0])
    assert torch.cuda.initial_seed() != 0
    torch.seed()
    torch.random.manual_seed(4)
    drawn = torch.randn(3, device="cuda").tolist()
    torch.manual_seed(4)
    assert torch.randn(3, device="cuda").tolist() == drawn
