"""Compare what programs do on the proxied device with what they do on the CPU.

Run under a device session. Prints one JSON object for each behaviour: its name, whether it is
``ok``, and a ``message`` that says what is not.
"""

from __future__ import annotations

import json
import warnings

import torch

# Each registers its behaviours when imported.
from tests.behaviours import (  # noqa: F401
    algebra,
    comparison,
    derivatives,
    elementwise,
    indexing,
    layers,
    layout,
    programs,
    randomness,
    reductions,
    refusals,
    training,
)


def main() -> None:
    # Whoever asks for cuda must have got it: a fallback to the CPU would compare it with itself.
    assert torch.zeros(1, device="cuda").is_cuda
    # What is quiet on the CPU must be quiet here.
    warnings.simplefilter("error", UserWarning)
    for name, message in comparison.compared():
        print(json.dumps({"name": name, "ok": not message, "message": message}), flush=True)


if __name__ == "__main__":
    main()
