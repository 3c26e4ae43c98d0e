"""PyTorch's own samples of its operators, run on the proxied device and on the CPU, and compared.

``python -m tests.conformance`` runs all of `torch.testing`'s ``op_db`` and prints how many samples
passed, were refused and failed; ``--help`` says what can be chosen. `__main__` starts programs
under device sessions and outlives them; `program` is such a program.
"""
