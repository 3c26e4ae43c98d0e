"""States of generators that have no offset, as DTensor advances them."""

from __future__ import annotations

from types import ModuleType

import torch

from kernelproxy.kernel.torch_cuda.dtensor_random import SeededState, accept_states_of_the_host


def drawn(state: torch.Tensor) -> list[float]:
    generator = torch.Generator()
    generator.set_state(state)
    return torch.rand(4, generator=generator).tolist()


def at(start: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the state for an offset, as DTensor sets it."""
    state = SeededState(start)
    state.offset = state.offset.clone() + offset
    found: torch.Tensor = state.state
    return found


def test_replicas_draw_what_one_process_would_draw() -> None:
    start = torch.Generator().manual_seed(5).get_state()
    assert drawn(at(start, 0)) == drawn(start)


def test_shards_draw_different_numbers_that_depend_on_state_and_offset() -> None:
    start = torch.Generator().manual_seed(5).get_state()
    other = torch.Generator().manual_seed(6).get_state()
    found = [drawn(at(state, offset)) for state in (start, other) for offset in (0, 64, 128)]
    assert len({tuple(each) for each in found}) == 6
    assert drawn(at(start, 64)) == found[1]


def test_all_shards_continue_with_the_same_state() -> None:
    start = torch.Generator().manual_seed(5).get_state()
    ends = []
    for offset in (0, 64):
        state = SeededState(start)
        before = state.offset.clone()
        state.offset = before + offset
        state.offset = before + 256
        ends.append(state.state)
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], start)


def test_states_of_a_gpu_are_left_to_torch() -> None:
    module = ModuleType("_random")
    module.__dict__["_PhiloxState"] = lambda state: "torch's"
    accept_states_of_the_host(module)
    assert module._PhiloxState(torch.zeros(16, dtype=torch.uint8)) == "torch's"
    start = torch.Generator().manual_seed(5).get_state()
    assert isinstance(module._PhiloxState(start), SeededState)
