"""Sessions of processes that a kernel has started, as parts of its checkpoint."""
