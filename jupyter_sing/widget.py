"""Name for notebooks: ``from jupyter_sing import widget``."""

from jupyter_sing.notebook.widget import Panel, Status, status

__all__ = ["Panel", "Status", "status"]
