"""``python -m tests.doubles.cuda DIRECTORY COMMAND...``: run a command on two cards of the double.

The directory must not exist; its file ``log`` says what the processes did.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.doubles.cuda.build import build, build_operators
from tests.doubles.cuda.cards import Cards

ROOT = Path(__file__).resolve().parents[3]
MEMORY, CONTEXT = 4 << 30, 100 << 20


def main() -> None:
    built = ROOT / "build" / "cuda-double"
    directory = Path(sys.argv[1]).resolve()
    cards = Cards(directory, build(built), [MEMORY] * 2, CONTEXT, build_operators(built))
    # The host computes for both cards: threads that wait for each other would take its cores.
    os.environ.update({"OMP_NUM_THREADS": "1", **cards.environment})
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
