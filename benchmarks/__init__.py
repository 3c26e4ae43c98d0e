"""Benchmarks: programs that users train, and their cost under the proxy and with plain torch."""
