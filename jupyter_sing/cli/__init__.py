"""Command line: `jupyter sing`."""

from __future__ import annotations


def main() -> int:
    """Run `jupyter sing` (the entry point), see `commands.main`."""
    from jupyter_sing.cli import commands

    return commands.main()
