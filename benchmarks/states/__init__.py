"""Benchmarks of suspending, resuming, saving and spilling."""
