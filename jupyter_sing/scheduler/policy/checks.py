"""Checks of a policy beyond its grammar: names that exist, once, and limits in order."""

from __future__ import annotations

from itertools import pairwise

from jupyter_sing.scheduler.policy.errors import PolicyError, quoted
from jupyter_sing.scheduler.policy.guaranteed import check_guarantees
from jupyter_sing.scheduler.policy.model import Policy
from jupyter_sing.scheduler.policy.phrases import value_text
from jupyter_sing.scheduler.policy.resolve import is_pattern, tier_terms
from jupyter_sing.scheduler.settings import Tier


def check(policy: Policy) -> None:
    """Refuse a policy that contradicts itself.

    Raises
    ------
    PolicyError
        At the first contradiction.
    """
    _check_cluster(policy)
    _check_tiers(policy)
    _check_others(policy)
    _check_names(policy)
    check_guarantees(policy)


def _wrong(policy: Policy, path: str, problem: str) -> PolicyError:
    line = policy.lines.get(path, policy.lines.get(path.rpartition(".")[0]))
    return PolicyError(path, problem, line)


def _check_cluster(policy: Policy) -> None:
    cluster = policy.cluster
    by_cells = cluster is not None and bool(cluster.cell_types or cluster.physical_cells)
    if cluster is not None:
        if by_cells and (cluster.hosts is not None or cluster.devices_per_host is not None):
            problem = "has equal hosts and cells; one of the two is allowed"
            raise _wrong(policy, "cluster", problem)
        if not by_cells and cluster.devices_per_host is None:
            raise _wrong(policy, "cluster.devices_per_host", "is missing")
        if by_cells and not cluster.physical_cells:
            raise _wrong(policy, "cluster.physical_cells", "is missing")
    for vc in policy.virtual_clusters:
        path = f"virtual_clusters.{vc.name}"
        if by_cells and vc.guaranteed_devices is not None:
            problem = "is for clusters of equal hosts; here it is guaranteed_cells"
            raise _wrong(policy, f"{path}.guaranteed_devices", problem)
        if cluster is None and vc.guaranteed_devices:
            problem = "needs to know what there is: cluster.devices_per_host is missing"
            raise _wrong(policy, f"{path}.guaranteed_devices", problem)
        for key in ("guaranteed_cells", "pinned_cells"):
            if not by_cells and getattr(vc, key):
                problem = "needs cells: cluster.physical_cells is missing"
                raise _wrong(policy, f"{path}.{key}", problem)


def _check_tiers(policy: Policy) -> None:
    for tier in Tier:
        terms = tier_terms(policy, tier)
        if terms.hibernate_after < terms.suspend_after:
            problem = (
                "must not be earlier than suspend_after, which is "
                f"{value_text('suspend_after', terms.suspend_after)}"
            )
            raise _wrong(policy, f"tiers.{tier}.hibernate_after", problem)
    for above, below in pairwise(Tier):
        most, percent = (tier_terms(policy, tier).gpu_percent for tier in (above, below))
        if percent > most:
            if getattr(policy.tiers, below.value).gpu_percent is not None:
                path, problem = below, f"must be at most {most:g}, as that of {above} is"
            else:
                path, problem = above, f"must be at least {percent:g}, as that of {below} is"
            raise _wrong(policy, f"tiers.{path}.gpu_percent", problem)


def _check_others(policy: Policy) -> None:
    others = policy.others
    if others.admitted is False:
        for key in ("virtual_cluster", "tier", "weight", "packing"):
            if getattr(others, key) is not None:
                raise _wrong(policy, f"others.{key}", "means nothing, as others are not admitted")
        if others.quotas != type(others.quotas)():
            raise _wrong(policy, "others.quotas", "means nothing, as others are not admitted")
    known = [vc.name for vc in policy.virtual_clusters]
    if others.virtual_cluster not in (None, "default", *known):
        problem = f"must be one of virtual_clusters ({', '.join(known) or 'there are none'})"
        raise _wrong(policy, "others.virtual_cluster", problem)


def _check_names(policy: Policy) -> None:
    """Refuse duplicate names: each user is in one virtual cluster, and in one group at most."""
    entries: dict[str, str] = {}
    members: dict[str, str] = {}
    clusters: dict[str, str] = {}
    for vc in policy.virtual_clusters:
        at = f"virtual_clusters.{vc.name}"
        named = [(entries, user.name, f"{at}.users[{i}]") for i, user in enumerate(vc.users)]
        named += [
            (members, name, f"{at}.groups.{group.name}.members[{i}]")
            for group in vc.groups
            for i, name in enumerate(group.members)
        ]
        for known, name, path in named:
            what = "pattern" if is_pattern(name) else "user"
            if name in known:
                problem = f"names the {what} {quoted(name)} again, after {known[name]}"
                raise _wrong(policy, path, problem)
            known[name] = path
            if clusters.setdefault(name, vc.name) != vc.name:
                problem = (
                    f"names the {what} {quoted(name)}, who is in the virtual cluster "
                    f"{clusters[name]} already"
                )
                raise _wrong(policy, path, problem)
