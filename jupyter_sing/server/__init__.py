"""Jupyter server extension: REST, events, metrics."""
