"""Checks of calls, graphs, streams, profilers and transforms."""
