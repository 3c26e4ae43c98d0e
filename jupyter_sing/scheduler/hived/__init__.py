"""Guarantees: which virtual cluster may rely on which part of the devices, after HiveD.

`Configuration` declares the cells and the guarantees, and is refused if it guarantees too much. The
engine calls `HivedGuarantees`; `HivedCluster` does the same for groups of pods.
"""

from jupyter_sing.scheduler.hived.allocation import HivedCluster
from jupyter_sing.scheduler.hived.cells import (
    AffinityGroup,
    CellState,
    GroupMember,
    GroupRequest,
    GroupState,
    GroupWaiting,
    Placed,
    Reserved,
)
from jupyter_sing.scheduler.hived.config.configuration import (
    CellSpec,
    Chain,
    Configuration,
    Level,
    VirtualCellSpec,
    VirtualClusterSpec,
)
from jupyter_sing.scheduler.hived.config.layout import VirtualCellStatus
from jupyter_sing.scheduler.hived.config.parsing import configuration_of
from jupyter_sing.scheduler.hived.config.reconfiguration import Changes, reconfigured
from jupyter_sing.scheduler.hived.errors import (
    ConfigurationError,
    GuaranteesError,
    HivedInternalError,
    RequestError,
)
from jupyter_sing.scheduler.hived.leases import HivedGuarantees

__all__ = [
    "AffinityGroup",
    "CellSpec",
    "CellState",
    "Chain",
    "Changes",
    "Configuration",
    "ConfigurationError",
    "GroupMember",
    "GroupRequest",
    "GroupState",
    "GroupWaiting",
    "GuaranteesError",
    "HivedCluster",
    "HivedGuarantees",
    "HivedInternalError",
    "Level",
    "Placed",
    "RequestError",
    "Reserved",
    "VirtualCellSpec",
    "VirtualCellStatus",
    "VirtualClusterSpec",
    "configuration_of",
    "reconfigured",
]
