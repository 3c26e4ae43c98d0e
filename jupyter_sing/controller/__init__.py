"""Live controller: runs the scheduler's engine on the agent's devices and sessions."""

from jupyter_sing.controller.controller import Controller

__all__ = ["Controller"]
