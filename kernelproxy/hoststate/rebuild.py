"""An alias: pickles in checkpoints of earlier versions name functions of this module."""

from kernelproxy.kernel.namespace.rebuild import *  # noqa: F403
