"""Kernels as processes: process managers, images, hibernation."""
