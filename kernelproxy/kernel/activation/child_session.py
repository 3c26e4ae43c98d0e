"""Sessions that processes open for themselves."""

from __future__ import annotations

import os
import sys

from kernelproxy.common import paths
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import OpenSession, OpenSessionReply


def open_session(parent: str) -> str:
    """Open a session for this process, which another one with the session `parent` has started."""
    name = os.path.basename(sys.argv[0] or "python")
    request = OpenSession(name=name, kernel_id="", python=sys.executable, script=True)
    with connect(start=False, path=paths.socket_path()) as control:
        return control.expect(OpenSessionReply, request, timeout=60).session
