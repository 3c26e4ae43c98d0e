"""Checks of ``torch.cuda`` by subject; `tests.programs.operators.surface` runs them."""
