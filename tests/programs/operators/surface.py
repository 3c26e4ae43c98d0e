"""Checks of what programs expect of ``torch.cuda``, run under a device session.

Prints one JSON object for each check: its name, and the error's text or "".
"""

from __future__ import annotations

import argparse
import json
import traceback
import warnings

from tests.surface import (  # noqa: F401
    device,
    files,
    memory,
    precision,
    printing,
    processes,
    randomness,
    refusals,
    settings,
)
from tests.surface.checking import CHECKS

# Each registers its checks when imported.
from tests.surface.execution import (  # noqa: F401
    calls,
    graphs,
    profiling,
    streams,
    transforms,
)


def main() -> None:
    # The programs of users do not treat warnings as errors; ours must not cause any.
    warnings.simplefilter("error", UserWarning)
    parser = argparse.ArgumentParser()
    parser.add_argument("checks", nargs="*", help="all if none are named")
    parser.add_argument("--leave-out", nargs="*", default=[])
    options = parser.parse_args()
    for function in CHECKS:
        name = function.__name__
        if (options.checks and name not in options.checks) or name in options.leave_out:
            continue
        error = ""
        try:
            function()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
