"""Runs a Python program under the session that ``jupyter sing run`` opened for it.

``python -m kernelproxy.kernel.activation.run_script SCRIPT [ARGS...]``
"""

from __future__ import annotations

import os
import runpy
import sys

from kernelproxy.kernel.activation import activate, cell


def main() -> None:
    """Activate, then become the program: its ``__main__``, its arguments, its exit status."""
    del sys.argv[0]
    if not sys.argv:
        raise SystemExit(
            "usage: python -m kernelproxy.kernel.activation.run_script SCRIPT [ARGS...]"
        )
    activate()
    # The whole program is one cell: it counts as busy also while it computes between two operators,
    # so that other sessions do not evict its memory then.
    cell(1)
    # `python SCRIPT` would search beside the script, not in the working directory.
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
