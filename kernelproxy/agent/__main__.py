"""``python -m kernelproxy.agent`` runs the daemon."""

import sys

from kernelproxy.agent.api.daemon import main

sys.exit(main())
