"""Errors of the guarantees.

::

    GuaranteesError
    ├── ConfigurationError   a configuration that is wrong, or guarantees more than there is
    ├── RequestError         a request that could never be served as it stands
    └── HivedInternalError   an invariant is broken
"""

from __future__ import annotations

from jupyter_sing.scheduler.decisions import GuaranteesError, RequestError

__all__ = ["ConfigurationError", "GuaranteesError", "HivedInternalError", "RequestError"]


class ConfigurationError(GuaranteesError):
    """The configuration is wrong, or guarantees more than there is. Nothing was changed."""


class HivedInternalError(GuaranteesError):
    """An invariant is broken: a bug of this package."""
