"""Errors of the guarantees.

::

    GuaranteesError
    ├── ConfigurationError   a configuration that is wrong, or guarantees more than there is
    ├── RequestError         a request that could never be served as it stands
    └── InternalError        an invariant is broken
"""

from __future__ import annotations


class GuaranteesError(Exception):
    """Base of all errors of the guarantees."""


class ConfigurationError(GuaranteesError):
    """The configuration is wrong, or guarantees more than there is. Nothing was changed."""


class RequestError(GuaranteesError):
    """The request could never be served as it stands. Nothing was changed."""


class HivedInternalError(GuaranteesError):
    """An invariant is broken: a bug of this package."""
