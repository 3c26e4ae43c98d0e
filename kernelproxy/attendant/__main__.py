"""``python -m kernelproxy.attendant`` runs the attendant."""

import sys

from kernelproxy.attendant.host import main

sys.exit(main())
