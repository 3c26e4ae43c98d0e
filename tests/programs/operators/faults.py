"""An error within a kernel fails its operator, not the session; run under a session.

On a GPU such a kernel asserts, after which its process cannot use the device any more: the worker
is replaced, and the next one continues at the same position. Prints one JSON object for each
fault: its name, and the error's text or "".
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable

import torch
from torch.nn import functional

FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda x, nine: x[nine],
    "embedding": lambda x, nine: functional.embedding(nine, x),
    "gather": lambda x, nine: x.gather(0, nine[None]),
    "nll_loss": lambda x, nine: functional.nll_loss(x, nine.expand(3)),
}


def survives(fault: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Let it raise once, and check that nothing is lost."""
    kept = torch.arange(9.0, device="cuda").reshape(3, 3)
    nine = torch.tensor([9], device="cuda")
    torch.cuda.synchronize()
    try:
        fault(kept, nine).sum().item()
    except (RuntimeError, IndexError):
        pass
    else:
        raise AssertionError("nothing was raised")
    assert kept.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    assert (kept @ kept).sum().item() == 486.0


def main() -> None:
    for name, fault in FAULTS.items():
        error = ""
        try:
            survives(fault)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
