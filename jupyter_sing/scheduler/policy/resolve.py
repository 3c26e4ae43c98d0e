"""Effective policy of one user, and which lines of the document determine it.

The nearest entry decides. Each term is taken from the first of these that has it: the user's entry,
the group, ``each`` of the virtual cluster (for users that the document does not name: ``others``,
then ``each``), ``defaults``, and what is built in. Quotas are taken one by one.

An exact name is nearer than a pattern, also where the name is a group's member and the pattern an
entry; among patterns, the first of the document counts. A pattern is its own exact name, so that
`resolve` can be called with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from jupyter_sing.scheduler.policy.model import (
    Policy,
    Quotas,
    TierTerms,
    User,
    UserGroup,
    UserTerms,
    VirtualCluster,
)
from jupyter_sing.scheduler.settings import EngineSettings, Tier

DEFAULT_VIRTUAL_CLUSTER = "default"

_TIER_TERMS = {
    Tier.PREMIUM: TierTerms(gpu_percent=95.0),
    Tier.STANDARD: TierTerms(gpu_percent=70.0),
    Tier.BASIC: TierTerms(gpu_percent=0.0),
}
# Defaults of sessions without any policy.
_IDLE_TERMS = TierTerms(suspend_after=600.0, hibernate_after=math.inf, max_hold=math.inf)
_TERMS = UserTerms(tier=Tier.STANDARD, weight=1.0, packing=False)

QUOTAS = tuple(field.name for field in fields(Quotas))
TIER_TERMS = tuple(field.name for field in fields(TierTerms))


@dataclass(frozen=True, slots=True)
class EffectiveQuotas:
    """Effective quotas; `math.inf`: unlimited. Bytes, hours, devices as in `Quotas`."""

    devices: float = math.inf
    device_memory: float = math.inf
    gpu_hours_per_day: float = math.inf
    disk: float = math.inf


@dataclass(frozen=True, slots=True)
class EffectiveTier:
    """Effective terms of a tier; seconds, `math.inf`: never."""

    gpu_percent: float
    suspend_after: float
    hibernate_after: float
    max_hold: float


@dataclass(frozen=True, slots=True)
class Decided:
    """Origin of a decision.

    Attributes
    ----------
    key
        A key of terms, such as ``tier`` or ``quotas.devices``.
    path, line
        The part of the document that decides it; None if it is built in.
    """

    key: str
    path: str | None
    line: int | None


@dataclass(frozen=True, slots=True)
class UserPolicy:
    """Effective policy of one user.

    Attributes
    ----------
    admitted
        Whether they may use devices. If not, the rest is what they would have.
    group
        The group whose terms apply, if any.
    guaranteed
        Whether anything is guaranteed to their virtual cluster.
    quotas, cluster_quotas
        Of the user, and of all users of the virtual cluster together.
    decided
        Origin of each term, in a fixed order.
    """

    user: str
    admitted: bool
    virtual_cluster: str
    group: str | None
    guaranteed: bool
    tier: Tier
    weight: float
    packing: bool
    quotas: EffectiveQuotas
    cluster_weight: float
    cluster_quotas: EffectiveQuotas
    terms: EffectiveTier
    decided: tuple[Decided, ...]


@dataclass(frozen=True, slots=True)
class _Mention:
    """A place where a policy names a user: in an entry of `users` or as a member of a group."""

    cluster: VirtualCluster
    path: str
    name: str
    terms: User | UserGroup
    terms_path: str


def is_pattern(name: str) -> bool:
    """True if a name is a pattern."""
    return any(c in "*?[" for c in name)


class Resolver:
    """Resolves a policy for users; created once for many of them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._exact: dict[str, list[_Mention]] = {}
        self._patterns: list[_Mention] = []
        for mention in _mentions(policy):
            self._exact.setdefault(mention.name, []).append(mention)
            if is_pattern(mention.name):
                self._patterns.append(mention)

    def resolve(self, user: str) -> UserPolicy:
        """Return the effective policy of a user; the document need not name them."""
        policy, mentions = self.policy, self._find(user)
        cluster = mentions[0].cluster if mentions else home_of_others(policy)
        sources = list(_sources(policy, cluster, mentions))
        decided = [_decided(policy, "virtual_cluster", _membership(policy, mentions))]
        chosen, quotas = {}, {}
        for key in ("tier", "weight", "packing"):
            chosen[key], source = _first(sources, key, getattr(_TERMS, key))
            decided.append(_decided(policy, key, source))
        for key in QUOTAS:
            below = [(f"{path}.quotas", terms.quotas) for path, terms in sources]
            quotas[key], source = _first(below, key, math.inf)
            decided.append(_decided(policy, f"quotas.{key}", source))
        tier: Tier = chosen["tier"]
        for key in TIER_TERMS:
            configured = getattr(getattr(policy.tiers, tier.value), key) is not None
            decided.append(_decided(policy, key, f"tiers.{tier}.{key}" if configured else None))
        return UserPolicy(
            user=user,
            admitted=bool(mentions) or policy.others.admitted is not False,
            virtual_cluster=cluster.name,
            group=next((m.terms.name for m in mentions if isinstance(m.terms, UserGroup)), None),
            guaranteed=bool(
                cluster.guaranteed_devices or cluster.guaranteed_cells or cluster.pinned_cells
            ),
            quotas=EffectiveQuotas(**quotas),
            cluster_weight=1.0 if cluster.weight is None else cluster.weight,
            cluster_quotas=limits(cluster.quotas),
            terms=tier_terms(policy, tier),
            decided=tuple(decided),
            **chosen,
        )

    def _find(self, user: str) -> list[_Mention]:
        """Return at most an entry and a group, the nearest first, all of one virtual cluster."""
        found = [
            *self._exact.get(user, ()),
            *(each for each in self._patterns if fnmatchcase(user, each.name)),
        ]
        found = [each for each in found if each.cluster is found[0].cluster]
        nearest: dict[type, _Mention] = {}
        for each in found:
            nearest.setdefault(type(each.terms), each)
        return list(nearest.values())


def resolve(policy: Policy, user: str) -> UserPolicy:
    """Return the effective policy of one user; `user` is the name in the server or system."""
    return Resolver(policy).resolve(user)


def home_of_others(policy: Policy) -> VirtualCluster:
    """Return the virtual cluster of users that no virtual cluster names."""
    name = policy.others.virtual_cluster or DEFAULT_VIRTUAL_CLUSTER
    described = (each for each in policy.virtual_clusters if each.name == name)
    return next(described, VirtualCluster(name=name))


def tier_terms(policy: Policy, tier: Tier) -> EffectiveTier:
    """Return the effective terms of a tier."""
    configured: TierTerms = getattr(policy.tiers, tier.value)
    found = {}
    for key in TIER_TERMS:
        layers = (configured, _TIER_TERMS[tier], _IDLE_TERMS)
        found[key] = next(v for each in layers if (v := getattr(each, key)) is not None)
    return EffectiveTier(**found)


def grow_after(policy: Policy) -> float:
    """Return the seconds that a device is idle before a job grows onto it; `math.inf`: never."""
    configured = policy.jobs.grow_after
    return EngineSettings().grow_after if configured is None else configured


def limits(quotas: Quotas) -> EffectiveQuotas:
    """Return the effective quotas without any defaults."""
    return EffectiveQuotas(**{k: v for k in QUOTAS if (v := getattr(quotas, k)) is not None})


def _mentions(policy: Policy) -> Iterator[_Mention]:
    """Yield the names of a policy: in each virtual cluster entries, then groups."""
    for cluster in policy.virtual_clusters:
        path = f"virtual_clusters.{cluster.name}"
        for i, user in enumerate(cluster.users):
            here = f"{path}.users[{i}]"
            yield _Mention(cluster, here, user.name, user, here)
        for group in cluster.groups:
            here = f"{path}.groups.{group.name}"
            for i, name in enumerate(group.members):
                yield _Mention(cluster, f"{here}.members[{i}]", name, group, here)


def _sources(
    policy: Policy, cluster: VirtualCluster, mentions: Sequence[_Mention]
) -> Iterator[tuple[str, UserTerms]]:
    """Yield the paths and terms that apply to a user, from the nearest to the farthest."""
    if mentions:
        yield from ((each.terms_path, each.terms) for each in mentions)
    else:
        yield "others", policy.others
    yield f"virtual_clusters.{cluster.name}.each", cluster.each
    yield "defaults", policy.defaults


def _first(sources: Sequence[tuple[str, Any]], key: str, built_in: Any) -> tuple[Any, str | None]:
    for path, terms in sources:
        value = getattr(terms, key)
        if value is not None:
            return value, f"{path}.{key}"
    return built_in, None


def _membership(policy: Policy, mentions: Sequence[_Mention]) -> str | None:
    """Return the path in the document that determines the virtual cluster of a user."""
    if mentions:
        return mentions[0].path
    for key in ("admitted", "virtual_cluster"):
        if getattr(policy.others, key) is not None:
            return f"others.{key}"
    return None


def _decided(policy: Policy, key: str, path: str | None) -> Decided:
    return Decided(key, path, None if path is None else policy.lines.get(path))
