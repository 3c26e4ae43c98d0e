"""Entry point of ``python -m kernelproxy.kernel_host``: the kernel host."""

import sys

from kernelproxy.kernel_host.daemon import main

sys.exit(main())
