"""The real daemon over toy zygotes: ``python -m tests.doubles.daemon READY_FD SETTINGS_JSON``."""

from __future__ import annotations

import json
import sys

from kernelproxy.agent.daemon import run
from kernelproxy.agent.settings import Settings

if __name__ == "__main__":
    given = {"zygote_command": ["-m", "tests.doubles.zygote"], **json.loads(sys.argv[2])}
    sys.exit(run(int(sys.argv[1]), Settings(**given)))
