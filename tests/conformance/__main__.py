"""Run PyTorch's samples of all operators and print what became of them.

Uses a daemon of its own, with a software device that has one thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Stop
from tests.conformance import running


def main() -> int:
    """Run what the command line selects; the exit status is 1 if a sample failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--programs", type=int, default=os.cpu_count() or 1, help="at once")
    parser.add_argument("--dtypes", nargs="*", default=[], help="all that are declared for the CPU")
    parser.add_argument("--samples", type=int, default=0, help="at most so many of each operator")
    parser.add_argument(
        "--only", nargs="*", default=[], help="operators, such as nn_functional_gelu"
    )
    options = parser.parse_args()
    arguments = [f"--samples={options.samples}", "--dtypes", *options.dtypes]
    arguments += ["--only", *options.only]
    with tempfile.TemporaryDirectory(prefix="sing-conformance-") as directory:
        runtime = Path(directory) / "runtime"
        runtime.mkdir(mode=0o700)
        os.environ["JUPYTER_SING_RUNTIME_DIR"] = str(runtime)
        os.environ["JUPYTER_SING_DATA_DIR"] = str(Path(directory) / "data")
        try:
            report = running.run(options.programs, arguments)
        finally:
            with agent_client.connect(start=False) as connection:
                connection.call(Stop())
    print("\n".join(report.lines()))
    return int(bool(report.failed or report.refusals))


if __name__ == "__main__":
    sys.exit(main())
