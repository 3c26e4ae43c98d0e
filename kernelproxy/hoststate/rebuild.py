"""Alias module: pickles in checkpoints of earlier versions name its functions."""

from kernelproxy.kernel.namespace.rebuild import *  # noqa: F403
