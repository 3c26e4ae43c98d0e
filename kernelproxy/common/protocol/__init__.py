"""Typed messages between front ends, kernels, agent, zygotes and workers (standard library only).

`kernelproxy.common.ipc.framing` sends them over a stream socket. There is a module for each pair of
parties; other code imports messages from this package.
"""

from kernelproxy.common.protocol.base import *  # noqa: F403
from kernelproxy.common.protocol.kernel_host import *  # noqa: F403
from kernelproxy.common.protocol.process_manager import *  # noqa: F403
from kernelproxy.common.protocol.replies import *  # noqa: F403
from kernelproxy.common.protocol.requests import *  # noqa: F403
from kernelproxy.common.protocol.supervisor import *  # noqa: F403
from kernelproxy.common.protocol.worker import *  # noqa: F403
