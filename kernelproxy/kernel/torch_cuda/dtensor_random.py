"""Random operators of DTensors on software devices.

A GPU's generator has a state of 16 bytes, a seed and an offset, and DTensor gives each shard an
offset of its own. A software device's generator is that of the CPU, which has no offset. There, the
state of a shard is drawn from the common state and the shard's offset instead. So shards differ,
replicas are equal, and nothing depends on the devices that the ranks use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

_GPU_STATE_BYTES = 16


def install(watch: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Called before torch is imported; `watch` runs a function after a module's import."""
    watch("torch.distributed.tensor._random", accept_states_of_the_host)


def accept_states_of_the_host(module: ModuleType) -> None:
    """Make DTensor accept states without an offset.

    Parameters
    ----------
    module : module
        ``torch.distributed.tensor._random``.
    """
    original = module._PhiloxState

    def state_of(state: Any) -> Any:
        return original(state) if state.numel() == _GPU_STATE_BYTES else SeededState(state)

    module._PhiloxState = state_of  # type: ignore[attr-defined]


class SeededState:
    """Stands for ``_PhiloxState``: a generator's state, advanced by an offset.

    Parameters
    ----------
    state : torch.Tensor
        Of the generator, before the operator.
    """

    def __init__(self, state: Any) -> None:
        import torch

        self._torch = torch
        self._start = self._state = state.to("cpu")

    @property
    def state(self) -> Any:
        """The state for the offset that was set last."""
        return self._state

    @property
    def offset(self) -> Any:
        """The offset at the start, from which others are counted."""
        return self._torch.zeros(1, dtype=self._torch.int64)

    @offset.setter
    def offset(self, offset: Any) -> None:
        count = int(offset)
        if count == 0:
            self._state = self._start
            return
        content = self._start.numpy().tobytes() + count.to_bytes(8, "little", signed=True)
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
        self._state = self._torch.Generator().manual_seed(seed).get_state()
