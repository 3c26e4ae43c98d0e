"""Checkpoints: making, cataloguing, retention, restoring into a kernel."""
