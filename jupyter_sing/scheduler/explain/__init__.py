"""Explanations: why a session waits, and for how long it probably will."""
