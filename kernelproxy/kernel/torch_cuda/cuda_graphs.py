"""``torch.cuda.CUDAGraph`` and memory pools: the base classes that only CUDA builds have.

A graph is a part of the session's log that is kept instead of sent, and sent at every replay
(Note [Captures] in ``native/client/ops/capture.h``). So it holds no address of the device's
process, and outlives that process. Memory pools are only names: memory is accounted for, but not
cached.
"""

from __future__ import annotations

import itertools
from typing import Any

from kernelproxy.kernel.activation.native_client import NativeClient
from kernelproxy.kernel.torch_cuda.streams import refuse

_pools = itertools.count(1)
Pool = tuple[int, int]


def pool_handle() -> Pool:
    """Return a unique name of a pool."""
    return 0, next(_pools)


class MemPool:
    """``torch._C._MemPool``: only a name."""

    def __init__(
        self,
        allocator: Any = None,
        is_user_created: bool = True,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        if allocator is not None:
            refuse("An allocator of one's own", "device memory lies in another process")
        self._id = pool_handle()

    @property
    def id(self) -> Pool:
        return self._id

    @property
    def allocator(self) -> None:
        return None

    def use_count(self) -> int:
        return 1


def graph_type(client: NativeClient) -> type:
    """Return ``torch._C._CUDAGraph`` on the native `client`."""

    class CudaGraph:
        # The capture is freed together with the object that the native client returned for it.
        _capture: Any = None
        _complete = False
        _pool: Pool = (0, 0)

        def __new__(cls, keep_graph: bool = False) -> Any:
            return super().__new__(cls)

        def capture_begin(
            self, pool: Pool | None = None, capture_error_mode: str = "global"
        ) -> None:
            if capture_error_mode not in ("global", "thread_local", "relaxed"):
                raise RuntimeError(
                    "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, "
                    f"got {capture_error_mode}"
                )
            if self._capture is not None:
                raise RuntimeError(
                    "This CUDAGraph instance already owns a captured graph. To capture a new "
                    "graph, create a new instance or call reset()."
                )
            self._pool = pool or pool_handle()
            self._capture = client.capture_begin()

        def capture_end(self) -> None:
            if self._capture is None:
                raise RuntimeError("capture_end() was called before capture_begin()")
            client.capture_end(self._capture)
            self._complete = True

        def instantiate(self) -> None:
            self._check()

        def replay(self) -> None:
            self._check()
            client.replay(self._capture)

        def reset(self) -> None:
            self._capture, self._complete = None, False

        def pool(self) -> Pool:
            self._check()
            return self._pool

        def register_generator_state(self, generator: Any) -> None:
            """Do nothing: a replay uses the generators in their current state."""

        def enable_debug_mode(self) -> None:
            refuse("A CUDA graph's debug mode", "the graph is not the driver's")

        def debug_dump(self, debug_path: str) -> None:
            refuse("A CUDA graph's debug mode", "the graph is not the driver's")

        def raw_cuda_graph(self) -> int:
            refuse("A raw CUDA graph", "the graph is not the driver's")

        def raw_cuda_graph_exec(self) -> int:
            refuse("A raw CUDA graph", "the graph is not the driver's")

        def _check(self) -> None:
            if not self._complete:
                raise RuntimeError(
                    "Called CUDAGraph::replay without a preceding successful capture."
                )

    return CudaGraph
