"""Devices: memory grants and the sessions that share them."""
