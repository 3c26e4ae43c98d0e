"""Kernel provisioning for Jupyter servers."""
