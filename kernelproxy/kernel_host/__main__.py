"""``python -m kernelproxy.kernel_host`` runs the attendant."""

import sys

from kernelproxy.kernel_host.daemon import main

sys.exit(main())
