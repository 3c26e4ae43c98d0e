"""Run one module of `tests.libraries` and print, for each program, a line of JSON.

``libraries.py MODULE DEVICE``
"""

from __future__ import annotations

import importlib
import json
import sys

import torch

from tests.libraries import programs


def main() -> None:
    module, device = sys.argv[1:]
    # cuda must be available if requested: a fallback to the CPU would compare it with itself.
    assert torch.zeros(1, device=device).device.type == device
    assert torch.cuda.is_available() == (device == "cuda")
    importlib.import_module(f"tests.libraries.{module}")
    for result in programs.results(device):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
