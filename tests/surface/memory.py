"""Memory: statistics, limits, and running out of it."""

from __future__ import annotations

from functools import partial

import torch

from tests.surface.checking import check, refused


@check
def memory_is_accounted() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20
    del held
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 4 << 20
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before
    assert torch.cuda.memory_reserved() >= before
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert "Allocated memory" in torch.cuda.memory_summary()
    assert torch.accelerator.memory_allocated() == before
    torch.cuda.empty_cache()


@check
def out_of_memory_is_torchs_and_the_retry_works() -> None:
    take = partial(torch.empty, 3 << 30, dtype=torch.uint8, device="cuda")
    assert "memory" in refused(take, torch.cuda.OutOfMemoryError)
    held = torch.ones(1 << 20, device="cuda")
    assert held.sum().item() == 1 << 20


@check
def what_was_allocated_and_freed_is_counted() -> None:
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    made = [torch.empty(1 << 18, device="cuda") for _ in range(3)]
    del made[1:]
    after = torch.cuda.memory_stats()

    def grown(name: str) -> int:
        return after[name] - before[name]

    assert grown("allocation.all.allocated") == 3
    assert grown("allocation.all.freed") == 2
    assert grown("allocation.all.current") == grown("active.all.current") == 1
    assert grown("allocation.all.peak") == 3
    assert grown("allocated_bytes.all.allocated") == 3 << 20
    assert grown("allocated_bytes.all.freed") == 2 << 20
    assert grown("allocated_bytes.all.current") == 1 << 20
    assert grown("allocated_bytes.all.peak") == 3 << 20
    assert after["reserved_bytes.all.current"] >= after["allocated_bytes.all.current"]
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == (
        torch.accelerator.memory_allocated()
    )


@check
def a_process_may_be_held_to_a_part_of_the_memory() -> None:
    total = torch.cuda.mem_get_info()[1]
    failures = torch.cuda.memory_stats()["num_ooms"]
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        assert torch.cuda.get_per_process_memory_fraction() == 0.25
        take = partial(torch.empty, total // 3, dtype=torch.uint8, device="cuda")
        assert "allowed" in refused(take, torch.cuda.OutOfMemoryError)
        assert torch.cuda.memory_stats()["num_ooms"] == failures + 1
        assert torch.ones(3, device="cuda").sum().item() == 3
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    take()
    refused(lambda: torch.cuda.set_per_process_memory_fraction(1.5), ValueError)


@check
def the_accelerator_has_the_same_memory() -> None:
    with torch.accelerator.device_index(0):
        held = torch.empty(1 << 18, device=torch.accelerator.current_accelerator())
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
    assert torch.accelerator.max_memory_allocated() == torch.cuda.max_memory_allocated()
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.empty_cache()
    assert held.is_cuda
