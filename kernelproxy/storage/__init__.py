"""Snapshots outside of workers: the chunk store, which stores them on disk."""
