"""Snapshots outside of workers: their tables, and the store that keeps them on disk."""
