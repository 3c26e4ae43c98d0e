"""Pods that arrive one by one and name their group; the first places it for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_sing.scheduler.hived.allocation import HivedCluster
from jupyter_sing.scheduler.hived.cells import (
    AffinityGroup,
    GroupRequest,
    GroupWaiting,
    PhysicalCell,
    Reserved,
)
from jupyter_sing.scheduler.hived.errors import RequestError
from jupyter_sing.scheduler.hived.search import Suggested


@dataclass(frozen=True, slots=True)
class PodBound:
    """The pod has these devices of a node."""

    node: str
    devices: tuple[PhysicalCell, ...]


@dataclass(frozen=True, slots=True)
class PodVictims:
    """The place of the pod's group is reserved; these pods must leave first."""

    pods: tuple[str, ...]


class Pods:
    """Pods of a cluster's groups."""

    def __init__(self, cluster: HivedCluster) -> None:
        self.cluster = cluster
        self._groups: dict[str, str] = {}  # of pods with a place
        self._awaiting: dict[str, dict[str, None]] = {}  # pods of groups with a reservation

    def schedule(
        self,
        pod: str,
        leaves: int,
        request: GroupRequest,
        suggested: Suggested = None,
        *,
        preempt: bool = True,
    ) -> PodBound | PodVictims | GroupWaiting:
        """Place a pod, and its group if it is the first; see `HivedCluster.schedule`.

        Raises
        ------
        RequestError
            If the group has no such pods, or has all of them already, or could never be placed.
        """
        if all(member.leaves != leaves for member in request.members):
            raise RequestError(f"{request.name} has no pods with {leaves} devices, like {pod}.")
        group = self.cluster.groups.get(request.name)
        if group is None or group.preempting:
            outcome = self.cluster.schedule(request, suggested, preempt=preempt)
            self._awaiting = {n: p for n, p in self._awaiting.items() if n in self.cluster.groups}
            if isinstance(outcome, GroupWaiting):
                return outcome
            group = outcome.group
            if isinstance(outcome, Reserved):
                self._awaiting.setdefault(request.name, {})[pod] = None
                return PodVictims(tuple(name for g in outcome.victims for name in g.pods))
            self._awaiting.pop(request.name, None)
        return self._bound(pod, leaves, group)

    def release(self, pod: str) -> None:
        """Record that a pod has ended; its group ends with the last one.

        Raises
        ------
        RequestError
            If the pod has no place.
        """
        if pod not in self._groups:
            raise RequestError(f"{pod} has no place.")
        name = self._groups.pop(pod)
        group = self.cluster.groups[name]
        for slot in group.slots:
            if slot.pod == pod:
                slot.pod = None
        if not group.pods:
            self.cluster.release(name)

    def withdraw(self, pod: str, group: str) -> None:
        """Record that a pod no longer waits; a reservation ends with its last waiting pod."""
        waiting = self._awaiting.get(group, {})
        waiting.pop(pod, None)
        if not waiting and self._awaiting.pop(group, None) is not None:
            self.cluster.cancel(group)

    def _bound(self, pod: str, leaves: int, group: AffinityGroup) -> PodBound:
        slot = next((s for s in group.slots if s.leaves == leaves and s.pod is None), None)
        if slot is None:
            raise RequestError(
                f"{group.request.name} has all its pods with {leaves} devices already."
            )
        slot.pod = pod
        self._groups[pod] = group.request.name
        devices = tuple(seat.physical for seat in slot.seats)
        return PodBound(devices[0].node, devices)
