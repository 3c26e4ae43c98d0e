"""What a command waits for, in lines on standard error, while that takes its time."""

from __future__ import annotations

import sys
import threading
from typing import Any

from jupyter_sing.notebook import status_text
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.protocol import Changed, StatusReply, Watch
from kernelproxy.common.readable import without_turn

SAID_AFTER_SECONDS = 1.0


class Waiting:
    """Says what a session does for which a command waits, whenever that is something else.

    Parameters
    ----------
    session : str
        Id, unique prefix of one, or name.
    wanted : bool
        Whether anything may be said at all: programs want nothing.
    """

    def __init__(self, session: str, *, wanted: bool = True) -> None:
        self._session, self._wanted = session, wanted
        self._lock = threading.Lock()
        self._control: Control | None = None
        self._over = False
        self._said = ""
        self._timer = threading.Timer(SAID_AFTER_SECONDS, self._watch)
        self._timer.daemon = True

    def __enter__(self) -> Waiting:
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
        """Called in a thread, after a while."""
        try:
            with connect(start=False) as control:
                with self._lock:
                    self._control = control
                    if self._over:
                        return
                reply = control.expect(StatusReply, Watch(self._session))
                self._say(reply.sessions)
                while True:
                    changed = control.more()
                    if isinstance(changed, Changed):
                        self._say(changed.sessions)
        except ControlError:  # whoever waits is told what is wrong, or it is over
            pass
        finally:
            with self._lock:
                self._control = None

    def _say(self, sessions: list[dict[str, Any]]) -> None:
        for session in sessions:
            text = f"Waiting for {session['name']}. {status_text.state_text(session)}"
            with self._lock:
                # How long it takes changes all the time.
                if self._over or without_turn(text) == without_turn(self._said):
                    continue
                self._said = text
                print(f"{text} (Ctrl-C: stop waiting)", file=sys.stderr, flush=True)
