"""Checks of ``torch.cuda`` by subject, as programs use it; `tests.programs.surface` runs them."""
