"""Identifiers of sessions and devices, used by all parts of the scheduler."""

from __future__ import annotations

from typing import TypeAlias

SessionId: TypeAlias = str
DeviceId: TypeAlias = str
"""For example `node0/gpu3`, or `cpu:0` if there is only one host."""
