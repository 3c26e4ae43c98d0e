"""The daemon's process and its requests."""
