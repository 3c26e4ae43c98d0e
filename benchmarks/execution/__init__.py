"""Benchmarks of operators, compilation and the parts of a step."""
