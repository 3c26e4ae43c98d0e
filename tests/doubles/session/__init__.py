"""Doubles of a session's client and shared memory."""
