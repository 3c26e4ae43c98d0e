"""Guarantees: which virtual cluster may rely on which part of the devices, after HiveD.

`Configuration` declares the cells and the guarantees, and is refused if it guarantees too much. The
engine calls `Leases`; `Cluster` and `Pods` do the same for groups of pods.
"""

from jupyter_sing.scheduler.hived.allocation import Cluster
from jupyter_sing.scheduler.hived.cells import (
    CellState,
    Group,
    GroupRequest,
    GroupState,
    Member,
    Placed,
    Reserved,
    Waiting,
)
from jupyter_sing.scheduler.hived.config.configuration import (
    CellSpec,
    Chain,
    Configuration,
    Level,
    Promise,
    VirtualClusterSpec,
)
from jupyter_sing.scheduler.hived.config.layout import PromisedCell
from jupyter_sing.scheduler.hived.config.parsing import configuration_of
from jupyter_sing.scheduler.hived.config.reconfiguration import Changes, reconfigured
from jupyter_sing.scheduler.hived.errors import (
    ConfigurationError,
    GuaranteesError,
    InternalError,
    RequestError,
)
from jupyter_sing.scheduler.hived.leases import Leases
from jupyter_sing.scheduler.hived.pods import PodBound, Pods, PodVictims

__all__ = [
    "CellSpec",
    "CellState",
    "Chain",
    "Changes",
    "Cluster",
    "Configuration",
    "ConfigurationError",
    "Group",
    "GroupRequest",
    "GroupState",
    "GuaranteesError",
    "InternalError",
    "Leases",
    "Level",
    "Member",
    "Placed",
    "PodBound",
    "PodVictims",
    "Pods",
    "Promise",
    "PromisedCell",
    "RequestError",
    "Reserved",
    "VirtualClusterSpec",
    "Waiting",
    "configuration_of",
    "reconfigured",
]
