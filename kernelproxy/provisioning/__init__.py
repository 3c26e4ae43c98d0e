"""Kernels as a Jupyter server starts them."""
