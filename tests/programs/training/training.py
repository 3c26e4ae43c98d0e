"""Train the named programs and write, for each, a line of JSON with all that must be equal.

Losses are written in hexadecimal: they are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import programs


def results(names: list[str], device: str, steps: int) -> Iterator[dict[str, Any]]:
    """Train each program for some steps; language models generate afterwards."""
    for name in names:
        if name in programs.TRAINING:
            step = programs.TRAINING[name](device, True)
            yield {"name": name, "losses": [float(step()).hex() for _ in range(steps)]}
            continue
        model, step = programs.language_model(name, device, small=True)
        losses = [float(step()).hex() for _ in range(steps)]
        tokens = {}
        if name != "bert":
            for sample in (False, True):
                generated = programs.generate(model, device, 24, sample=sample)
                tokens["sampled" if sample else "greedy"] = generated.tolist()
        else:
            model.eval()
            prompt = torch.arange(1, 17).reshape(1, 16).to(device)
            tokens["restored"] = model(input_ids=prompt).logits.argmax(-1).tolist()
        yield {"name": name, "losses": losses, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    # cuda must be available if requested: a fallback to the CPU would compare it with itself.
    assert torch.zeros(1, device=options.device).device.type == options.device
    for result in results(options.names, options.device, options.steps):
        json.dump(result, sys.stdout)
        print(flush=True)


if __name__ == "__main__":
    main()
