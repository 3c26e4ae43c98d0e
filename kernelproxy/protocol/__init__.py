"""Typed messages between front ends, kernels, agent, zygotes and workers (standard library only).

`kernelproxy.frames` puts them on a stream socket. A module for each pair of parties; who uses them
imports them from here.
"""

from kernelproxy.protocol.base import *  # noqa: F403
from kernelproxy.protocol.keeping import *  # noqa: F403
from kernelproxy.protocol.kernels import *  # noqa: F403
from kernelproxy.protocol.replies import *  # noqa: F403
from kernelproxy.protocol.requests import *  # noqa: F403
from kernelproxy.protocol.tending import *  # noqa: F403
from kernelproxy.protocol.working import *  # noqa: F403
