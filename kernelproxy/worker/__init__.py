"""Processes beside torch: zygotes and workers (standard library and torch only)."""
