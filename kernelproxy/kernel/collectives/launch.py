"""Process groups by their objects, and the execution of their calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import distributed

from kernelproxy.kernel.collectives.group import Call, Group
from kernelproxy.kernel.collectives.host_threads import one_thread
from kernelproxy.kernel.collectives.replacement import Replacement
from kernelproxy.kernel.collectives.transport.waits import waits
from kernelproxy.kernel.collectives.work import Completion, all_of, forget

_groups: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
# Futures of the calls between the start and the end of a group's coalescing.
_coalesced: dict[Any, list[torch.futures.Future[Any]]] = {}
# The backward pass that has launched a collective last.
_last_backward = -1


def announce(process_group: Any, store: Any) -> None:
    """Let the other members of a new process group find this one."""
    name, rank, size = process_group.group_name, process_group.rank(), process_group.size()
    group = _groups[process_group] = Group(name, rank, size, store)
    weakref.finalize(process_group, _end, group)


def _end(group: Group) -> None:
    group.close()
    forget(group)


def unbox(boxed: Any) -> tuple[Any, Group]:
    process_group = distributed.ProcessGroup.unbox(boxed)
    group = _groups.get(process_group)
    if group is None:
        raise RuntimeError("The process group was not made by torch.distributed in this process.")
    return process_group, group


def launch(
    boxed: Any,
    text: str,
    async_op: bool,
    result: list[Any],
    task: Callable[[Call], None],
    replacement: Replacement | None = None,
) -> Any:
    """Execute a collective, or have it executed in the group's order; return its work.

    `replacement`: the context of the task; none: it needs none.
    """
    process_group, group = unbox(boxed)
    call, completion = group.begin(text), Completion(result, group)

    def execute() -> None:
        # Tensors made in inference mode can be written only there; others can be, too.
        around = replacement or nullcontext()
        with torch.inference_mode(), one_thread(), around, call.taking_part():
            task(call)

    if async_op:
        waits.begin()
        _note_end_of_backward()
        settles = settling(execute, completion, result, waits.complete)
        if replacement is None:
            group.lane().submit(settles)
        else:
            group.lane().submit(settles, replacement.storages, partial(replacement.ahead, call))
    else:
        group.lane().run(execute)
        completion.settle(result)
    note(process_group, completion)
    return completion.work()


def settling(
    execute: Callable[[], None],
    completion: Completion,
    result: list[Any],
    executed: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Return a task that executes a call, and completes it with its result or an error.

    `executed` is called between both.
    """

    def task() -> None:
        outcome: list[Any] | Exception = result
        try:
            execute()
        except Exception as error:
            outcome = error
        executed()
        completion.settle(outcome)

    return task


def _note_end_of_backward() -> None:
    """In a backward pass: let other ranks know when the program has issued all of it.

    DistributedDataParallel waits at the end for its collectives, in C++.
    """
    global _last_backward
    found: int = torch._C._current_graph_task_id()
    if found not in (-1, _last_backward):
        _last_backward = found
        torch.autograd.Variable._execution_engine.queue_callback(waits.end_backward)


def note(process_group: Any, completion: Completion) -> None:
    if (futures := _coalesced.get(process_group)) is not None:
        futures.append(completion.future)


def install_coalescing() -> None:
    """Let the end of a coalescing return a work of all calls in it; the carrier's is complete."""
    holder: Any = distributed.ProcessGroup
    start, end = holder._start_coalescing, holder._end_coalescing

    def start_coalescing(self: Any, device: torch.device) -> None:
        if device.type != "cuda":
            start(self, device)
        else:
            _coalesced[self] = []

    def end_coalescing(self: Any, device: torch.device) -> Any:
        return all_of(_coalesced.pop(self)) if device.type == "cuda" else end(self, device)

    holder._start_coalescing, holder._end_coalescing = start_coalescing, end_coalescing
