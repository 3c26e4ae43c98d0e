"""Doubles of kernels and their process manager."""
