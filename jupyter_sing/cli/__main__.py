"""Entry point of ``python -m jupyter_sing.cli``, which is `jupyter sing`."""

import sys

from jupyter_sing.cli import main

if __name__ == "__main__":
    sys.exit(main())
