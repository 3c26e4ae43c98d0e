"""Spilled state: device state in host memory and on disk."""
