"""Compare the results of programs on the proxied device with those on the CPU.

Run under a device session. Prints one JSON object for each behaviour: its name, whether it is
``ok``, and a ``message`` with the problems.

On a GPU the CPU's results are no reference, as its kernels round differently. There the results of
a device are saved with `--save`, once by plain torch and once under a device session, and compared
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

#: Kernels without a fixed order of additions differ between two runs of plain torch, too.
SAVED_RELATIVE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--leave-out", nargs="*", default=[])
    parser.add_argument("--save", help="file for the results of the device alone")
    parser.add_argument("--compare", nargs=2, help="two such files")
    options = parser.parse_args()
    if options.compare:
        one, other = options.compare
        report(comparison.compared_files(one, other, SAVED_RELATIVE))
        return
    # The requested device must be available: a fallback would compare the CPU with itself.
    assert torch.zeros(1, device=options.device).device.type == options.device
    # Calls without a warning on the CPU must have none here.
    warnings.simplefilter("error", UserWarning)
    # Raised once per process, about sparse and nested tensors.
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
