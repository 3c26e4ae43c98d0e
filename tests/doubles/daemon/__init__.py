"""Doubles of the agent and of the processes that it starts."""
