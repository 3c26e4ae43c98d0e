"""``python -m kernelproxy.native`` builds the libraries for one interpreter."""

import sys

from kernelproxy.native.build import main

if __name__ == "__main__":
    sys.exit(main())
