"""Streams and events."""

from __future__ import annotations

from typing import Any

import torch

from tests.surface.checking import check, refused


@check
def streams_and_events() -> None:
    stream = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        begin.record()
        x = torch.ones(300, 300, device="cuda") @ torch.ones(300, 300, device="cuda")
        end.record(stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(stream)
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) > 0
    stream.synchronize()
    assert isinstance(stream, torch.Stream)
    assert isinstance(end, torch.Event)
    assert len({stream, torch.cuda.Stream()}) == 2
    assert "cuda_stream" in repr(stream)
    torch.cuda.synchronize()
    torch.accelerator.synchronize()


@check
def streams_have_the_priority_that_was_asked_for() -> None:
    assert torch.cuda.Stream().priority == 0
    urgent = torch.cuda.Stream(priority=-1)
    assert urgent.priority == -1
    kind: Any = torch.cuda.Stream
    assert kind.priority_range() == (0, -1)
    with torch.cuda.stream(urgent):
        assert torch.cuda.current_stream() == urgent
        assert torch.cuda.current_stream().priority == -1


@check
def generic_streams_and_events_are_those_of_the_device() -> None:
    stream = torch.Stream(device="cuda")
    first, second = (torch.Event(device="cuda", enable_timing=True) for _ in range(2))
    with stream:
        assert torch.accelerator.current_stream() == stream
        first.record()
        torch.ones(100, 100, device="cuda").mm(torch.ones(100, 100, device="cuda"))
        stream.record_event(second)
    torch.accelerator.current_stream().wait_event(second)
    second.synchronize()
    assert first.elapsed_time(second) > 0
    assert stream.query() or not stream.synchronize()  # type: ignore[func-returns-value]
    untimed = torch.cuda.Event()
    untimed.record()
    assert "enable_timing" in refused(lambda: untimed.elapsed_time(untimed), Exception)
    assert "recorded" in refused(
        lambda: torch.cuda.Event(enable_timing=True).elapsed_time(
            torch.cuda.Event(enable_timing=True)
        ),
        Exception,
    )
