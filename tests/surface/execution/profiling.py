"""Profilers and markers."""

from __future__ import annotations

import json
import os
import tempfile

import torch

from tests.surface.checking import check


@check
def markers_and_profilers_do_no_harm() -> None:
    with torch.cuda.nvtx.range("outer"), torch.cuda.profiler.profile():
        torch.cuda.nvtx.mark("here")
    with torch.profiler.profile(acc_events=True) as profile:
        torch.ones(2, device="cuda").add(1)
    assert profile.key_averages()


@check
def the_profiler_sees_operators_and_their_shapes() -> None:
    model = torch.nn.Linear(4, 4).cuda()
    x = torch.ones(2, 4, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(
        activities=activities,
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
        acc_events=True,
    ) as profile:
        with torch.profiler.record_function("ours"):
            model(x).sum().backward()
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert {"ours", "aten::addmm", "aten::sum"} <= names
    assert "aten::addmm" in profile.key_averages().table(sort_by="cuda_time_total", row_limit=-1)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "trace.json")
        profile.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            assert json.load(file)["traceEvents"]


@check
def the_profiler_has_the_device_s_time() -> None:
    cpu, cuda = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    assert cuda in torch.profiler.supported_activities()
    x = torch.ones(256, 256, device="cuda")
    for activities in ([cpu, cuda], [cuda], None):
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            x @ x
        events = {event.key: event for event in profile.key_averages()}
        assert events["aten::mm"].count == 1
        assert 0 < events["aten::mm"].device_time_total <= events["aten::matmul"].device_time_total
    with torch.profiler.profile(activities=[cpu], acc_events=True) as profile:
        x @ x
    assert all(event.device_time_total == 0 for event in profile.key_averages())


@check
def profilers_may_run_on_a_schedule() -> None:
    seen = []
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2),
        acc_events=True,
        on_trace_ready=lambda profile: seen.append(len(profile.events())),
    ) as profile:
        for _ in range(4):
            torch.ones(3, device="cuda").mul(2).sum().item()
            profile.step()
    assert seen
    assert seen[0] > 0


@check
def older_profilers_work() -> None:
    with torch.autograd.profiler.profile() as profile:
        torch.ones(3, device="cuda").exp()
    assert any(event.key == "aten::exp" for event in profile.key_averages())
    for _ in range(3):  # also at its first calls, when the shape of its result is computed
        with torch.autograd.profiler_legacy.profile(use_cuda=True) as profile:
            torch.ones(3, device="cuda").exp()
        (event,) = (event for event in profile.function_events if event.name == "aten::exp")
        assert event.device_time > 0
        assert len({event.thread for event in profile.function_events}) == 1
    with torch.autograd.profiler.emit_nvtx():
        torch.ones(3, device="cuda").exp()
