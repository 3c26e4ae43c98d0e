"""Names of sessions and devices, as all parts of the scheduler use them."""

from __future__ import annotations

from typing import TypeAlias

SessionId: TypeAlias = str
DeviceId: TypeAlias = str
"""Such as `node0/gpu3`, or `cpu:0` where there is only one host."""
