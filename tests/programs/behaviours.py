"""Compare what programs do on the proxied device with what they do on the CPU.

Run under a device session. Prints one JSON object for each behaviour: its name, whether it is
``ok``, and a ``message`` that says what is not.

On a GPU the CPU's results are no measure, as other kernels round elsewhere. There the results of a
device are saved with `--save`, once by plain torch and once under a device session, and compared
with `--compare`.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable

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
    nested,
    programs,
    randomness,
    reductions,
    refusals,
    sparse,
    training,
)

#: Kernels that add in no fixed order differ between two runs of plain torch, too.
SAVED_RELATIVE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--leave-out", nargs="*", default=[])
    parser.add_argument("--save", help="file for the results of the device alone")
    parser.add_argument("--compare", nargs=2, help="two such files")
    options = parser.parse_args()
    if options.compare:
        report(comparison.compared_files(*options.compare, SAVED_RELATIVE))
        return
    # Whoever asks for a device must have got it: a fallback would compare the CPU with itself.
    assert torch.zeros(1, device=options.device).device.type == options.device
    # What is quiet on the CPU must be quiet here.
    warnings.simplefilter("error", UserWarning)
    # Said once in a process, of sparse and of nested tensors.
    warnings.filterwarnings("ignore", ".*(in beta state|in prototype stage)")
    if options.save:
        comparison.save(options.save, options.device, options.leave_out)
    else:
        report(comparison.compared())


def report(results: Iterable[tuple[str, str]]) -> None:
    for name, message in results:
        print(json.dumps({"name": name, "ok": not message, "message": message}), flush=True)


if __name__ == "__main__":
    main()
