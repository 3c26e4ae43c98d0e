"""Name for notebooks: ``from jupyter_sing import widget``."""

from jupyter_sing.notebook.widget import LiveStatus, StatusPanel, status

__all__ = ["LiveStatus", "StatusPanel", "status"]
