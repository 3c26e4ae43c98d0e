"""Tensor programs that run once on the CPU and once on the proxied device.

Each module is a table of small functions of a device; `comparison` runs them and compares what
they return. None of it is imported by the tests themselves:
`tests/programs/operators/behaviours.py` runs it under a device session.
"""
