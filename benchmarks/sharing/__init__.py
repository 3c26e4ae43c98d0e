"""Benchmarks of several sessions on one device."""
