"""What programs expect of ``torch.cuda``, by subject; `tests.programs.surface` runs it."""
