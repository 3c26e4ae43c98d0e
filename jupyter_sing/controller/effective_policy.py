"""A policy as the live controller uses it: effective terms, on the devices of this host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_sing.controller.guarantees import Nodes, guaranteed_configuration
from jupyter_sing.scheduler.decisions import Guarantees
from jupyter_sing.scheduler.no_guarantees import NoGuarantees
from jupyter_sing.scheduler.policy import Policy, PolicyError, Resolver, UserPolicy, parse
from jupyter_sing.scheduler.policy.numbers import numbers
from jupyter_sing.scheduler.policy.phrases import cluster_text
from jupyter_sing.scheduler.policy.resolve import tier_terms
from jupyter_sing.scheduler.settings import EngineSettings, Tier
from kernelproxy.common.errors import ControlError
from kernelproxy.common.scheduler_api import Allowance

if TYPE_CHECKING:
    from jupyter_sing.scheduler.hived import Configuration

_ORDER = tuple(Tier)  # the highest tier first


@dataclass(frozen=True, slots=True)
class EffectiveTerms:
    """Effective terms of one session.

    Attributes
    ----------
    vc, tier, may_pack
        See `scheduler.events.SessionAdded`.
    weight
        Share of its user.
    """

    vc: str
    tier: Tier
    may_pack: bool
    weight: float

    def __str__(self) -> str:
        return f"{self.tier} with weight {self.weight:g}, in {self.vc}"


class HostPolicy:
    """Effective policy on this host.

    Parameters
    ----------
    text : str
        The policy; empty: there is none, and all users are equal.
    nodes : mapping of str to sequence of str
        Present hosts, with their devices.
    guarantee : bool
        False to ignore the guarantees of the policy.

    Raises
    ------
    ControlError
        ``bad-policy``, if it is no policy, or guarantees devices that this host does not have.
    """

    def __init__(self, text: str, nodes: Nodes, *, guarantee: bool = True) -> None:
        self.text, self._nodes = text, nodes
        try:
            self.policy = parse(text) if text else Policy()
        except PolicyError as error:
            raise ControlError(str(error), "bad-policy") from None
        self._resolver = Resolver(self.policy)
        #: Guarantees of the policy; None: nothing is guaranteed.
        self.guaranteed: Configuration | None = (
            guaranteed_configuration(self.policy, nodes) if guarantee else None
        )

    def effective(self, user: str) -> UserPolicy:
        """Return the effective policy of a user."""
        return self._resolver.resolve(user)

    def standing(self, user: str, requested: str | None) -> EffectiveTerms:
        """Return the effective terms of a session.

        Parameters
        ----------
        user : str
            User of the session.
        requested : str, optional
            Tier that the user requested. It takes effect only if it is lower than the tier that the
            policy gives them.
        """
        found = self.effective(user)
        tier = (
            found.tier if requested is None else max(found.tier, Tier(requested), key=_ORDER.index)
        )
        return EffectiveTerms(found.virtual_cluster, tier, found.packing, found.weight)

    def denied(self, user: str) -> str:
        """Return why a user may use no device at all, in a sentence; empty: they may."""
        if not self.text:
            return ""
        found = self.effective(user)
        cluster = f"virtual cluster {found.virtual_cluster}"
        for name, quotas in ((user, found.quotas), (cluster, found.cluster_quotas)):
            if quotas.devices <= 0 or not found.admitted:
                return f"The policy does not let {name} use devices."
            if quotas.gpu_hours_per_day <= 0:
                return f"The policy gives {name} no device time."
        return ""

    def allowance(self, user: str, tier: Tier) -> Allowance:
        """Return the limits of a session of a tier besides leases; None: built-in."""
        if not self.text:
            return Allowance(tier=tier.value)
        found, configured = self.effective(user), getattr(self.policy.tiers, tier.value)
        terms = tier_terms(self.policy, tier)
        return Allowance(
            None if configured.suspend_after is None else terms.suspend_after,
            None if configured.hibernate_after is None else terms.hibernate_after,
            min(found.quotas.disk, found.cluster_quotas.disk),
            tier.value,
            device_memory=min(found.quotas.device_memory, found.cluster_quotas.device_memory),
        )

    def settings(self, base: EngineSettings, users: Iterable[str]) -> EngineSettings:
        """Return settings of the engine, with entries for these users."""
        if not self.text:
            return base
        return numbers(self.policy, map(self.effective, users), base)

    def guarantees(self) -> Guarantees:
        """Create the guarantees of the policy; without any, all devices are one pool."""
        if self.guaranteed is None:
            return NoGuarantees([device for devices in self._nodes.values() for device in devices])
        from jupyter_sing.scheduler.hived import HivedGuarantees

        return HivedGuarantees(self.guaranteed)

    def notes(self) -> list[str]:
        """Return how the cluster that the policy describes differs from this host."""
        cluster = self.policy.cluster
        devices = [device for found in self._nodes.values() for device in found]
        if cluster is None or (cluster.physical_cells and self.guaranteed is not None):
            return []
        here = (len(self._nodes), len(devices) // len(self._nodes))
        if not cluster.physical_cells and here == (cluster.hosts or 1, cluster.devices_per_host):
            return []
        count = f"{len(devices)} device{'' if len(devices) == 1 else 's'}"
        return [
            f"The policy describes {cluster_text(cluster)}, and this daemon has {count} "
            f"({', '.join(devices)}): everything else in it holds. To describe these, write "
            f"cluster: {{devices_per_host: {len(devices)}}}."
        ]
