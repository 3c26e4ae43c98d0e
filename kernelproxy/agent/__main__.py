"""``python -m kernelproxy.agent`` runs the daemon."""

import sys

from kernelproxy.agent.daemon import main

sys.exit(main())
