"""Users of the sessions of a workload, and the policy that applies to them.

A session ``user/anything`` belongs to that user. Other sessions are assigned to the users that the
policy names, in turn; a pattern stands for another user each time. If it names no users, each
session has a user of its own.

These parts of a policy are simulated: virtual clusters, guarantees, users, tiers, weights, holds,
and quotas but that of disks. Packing and idle times are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from jupyter_sing.scheduler.hived import ConfigurationError, HivedGuarantees
from jupyter_sing.scheduler.policy import Policy, Resolver, configuration
from jupyter_sing.scheduler.policy.numbers import numbers
from jupyter_sing.scheduler.policy.resolve import is_pattern
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings
from jupyter_sing.simulator.cluster import SimulationError
from jupyter_sing.simulator.run import SimulatedTerms
from jupyter_sing.simulator.workload import SimulatedSession, Workload

NOT_SIMULATED = "packing, idle times and quotas of disks are not simulated"


@dataclass(frozen=True)
class SimulatedPolicy:
    """Effective policy of a workload.

    Parameters
    ----------
    terms : dict of str to SimulatedTerms
        Of each session.
    settings : EngineSettings
    leases : HivedGuarantees or None
        None if nothing is guaranteed.
    """

    terms: Mapping[str, SimulatedTerms]
    settings: EngineSettings
    leases: HivedGuarantees | None

    def of(self, session: SimulatedSession) -> SimulatedTerms:
        """Return the terms of a session."""
        return self.terms[session.name]


def simulated_policy(
    policy: Policy, workload: Workload, devices: Sequence[DeviceSpec]
) -> SimulatedPolicy:
    """Apply a policy to a workload on these devices; call it again for each run.

    Raises
    ------
    SimulationError
        The policy does not admit a user, or describes other devices.
    """
    resolver, named = Resolver(policy), _named(policy)
    turns = cycle(named) if named else None
    terms, terms_by_user = {}, {}
    for session in workload.sessions:
        user, slash, _ = session.name.partition("/")
        resolved = user if slash or turns is None else next(turns)
        if resolved != user:
            user = f"{resolved} {session.name}" if is_pattern(resolved) else resolved
        found = resolver.resolve(resolved)
        if not found.admitted:
            raise SimulationError(f"The policy does not admit {user}.")
        terms[session.name] = SimulatedTerms(found.virtual_cluster, user, found.tier, found.weight)
        terms_by_user[user] = replace(found, user=user)
    settings = numbers(policy, terms_by_user.values(), EngineSettings())
    return SimulatedPolicy(terms, settings, _leases(policy, devices))


def _named(policy: Policy) -> list[str]:
    """Return the users and patterns that a policy names, in its order, each once."""
    names = [
        name
        for cluster in policy.virtual_clusters
        for name in (
            *(user.name for user in cluster.users),
            *(member for group in cluster.groups for member in group.members),
        )
    ]
    return list(dict.fromkeys(names))


def described(policy: Policy) -> tuple[tuple[str, str], ...]:
    """Return the nodes and devices that a policy names; empty if it names none."""
    if policy.cluster is None or not policy.cluster.physical_cells:
        return ()
    found = configuration(policy)
    if found is None:
        return ()
    return tuple(
        (cell.node, device) for device, cell in HivedGuarantees(found).cluster.devices.items()
    )


def _leases(policy: Policy, devices: Sequence[DeviceSpec]) -> HivedGuarantees | None:
    nodes: dict[str, list[str]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device.id)
    guaranteed = any(
        vc.guaranteed_devices or vc.guaranteed_cells or vc.pinned_cells
        for vc in policy.virtual_clusters
    )
    if not guaranteed:
        return None
    try:
        found = configuration(policy, nodes)
    except ConfigurationError as error:
        raise SimulationError(f"These devices are too few for the policy: {error}") from None
    return None if found is None else HivedGuarantees(found)
