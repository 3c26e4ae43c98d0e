"""Lines on standard error that show for what a command waits, while it takes long."""

from __future__ import annotations

import sys
import threading
from typing import Any

from jupyter_sing.notebook import status_text
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.protocol import Changed, StatusReply, WatchRequest
from kernelproxy.common.readable import without_turn

SAID_AFTER_SECONDS = 1.0


class WaitLines:
    """Reporter of the state of the session for which a command waits, at each change.

    Parameters
    ----------
    session : str
        Id, unique prefix of one, or name.
    wanted : bool
        Whether anything may be printed at all: not for programs.
    """

    def __init__(self, session: str, *, wanted: bool = True) -> None:
        self._session, self._wanted = session, wanted
        self._lock = threading.Lock()
        self._control: Control | None = None
        self._over = False
        self._said = ""
        self._timer = threading.Timer(SAID_AFTER_SECONDS, self._watch)
        self._timer.daemon = True

    def __enter__(self) -> WaitLines:
        if self._wanted:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._control is not None:
                self._control.abort()

    def _watch(self) -> None:
        """Print changes; called in a thread, after a delay."""
        try:
            with connect(start=False) as control:
                with self._lock:
                    self._control = control
                    if self._over:
                        return
                reply = control.expect(StatusReply, WatchRequest(self._session))
                self._say(reply.sessions)
                while True:
                    changed = control.more()
                    if isinstance(changed, Changed):
                        self._say(changed.sessions)
        except ControlError:  # the command itself reports the error, or it is done
            pass
        finally:
            with self._lock:
                self._control = None

    def _say(self, sessions: list[dict[str, Any]]) -> None:
        for session in sessions:
            text = f"Waiting for {session['name']}. {status_text.state_text(session)}"
            with self._lock:
                # The expected time changes continuously: compare without it.
                if self._over or without_turn(text) == without_turn(self._said):
                    continue
                self._said = text
                print(f"{text} (Ctrl-C: stop waiting)", file=sys.stderr, flush=True)
