"""Processes that store or restore, and are killed."""
