"""The live controller: the scheduler's engine over the agent's devices and sessions."""

from jupyter_sing.controller.controller import Controller

__all__ = ["Controller"]
