"""Alias package: checkpoints of earlier versions name its modules."""
