"""Differences of two policies: which users a change would affect, and how, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jupyter_sing.scheduler.policy.model import Policy, VirtualCluster
from jupyter_sing.scheduler.policy.phrases import (
    NAMES,
    cluster_text,
    counted,
    guarantee_text,
    quotas_text,
    value_text,
)
from jupyter_sing.scheduler.policy.resolve import (
    QUOTAS,
    TIER_TERMS,
    Resolver,
    UserPolicy,
    grow_after,
    limits,
)
from kernelproxy.common.units import mebibytes_text

NAMES_SHOWN_MAX = 5
_UNNAMED_USER = ""  # a user that no name refers to; a pattern may


@dataclass(frozen=True, slots=True)
class SessionUse:
    """State of a session that determines what a change means for it.

    Attributes
    ----------
    running
        True if a cell of it holds devices.
    devices
        Number of devices that it holds.
    device_memory
        Bytes that it has on devices, running or not.
    """

    user: str
    running: bool
    devices: int = 0
    device_memory: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """One change, and the users it affects.

    Attributes
    ----------
    who
        Users, patterns or ``others``; a virtual cluster, the cluster or ``jobs``, where those
        changed.
    place
        The virtual cluster of those users, if it stays the same one.
    changes
        What changes, in words.
    consequences
        What it means for what runs now, in words.
    """

    who: tuple[str, ...]
    place: str | None
    changes: tuple[str, ...]
    consequences: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = list(self.who)
        if len(shown) > NAMES_SHOWN_MAX:
            shown[NAMES_SHOWN_MAX:] = [f"{len(shown) - NAMES_SHOWN_MAX} more"]
        names = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
        place = "" if self.place is None else f" ({self.place})"
        return f"{names}{place}: {'; '.join((*self.changes, *self.consequences))}"


def differences(old: Policy, new: Policy, sessions: Sequence[SessionUse]) -> tuple[Difference, ...]:
    """Return which users a new policy would affect, and how.

    Those are the users of sessions, every user and pattern that one of the policies names, and the
    others. Users without sessions that have the same changes are listed together.

    Parameters
    ----------
    old, new : Policy
    sessions : sequence of SessionUse
        All present sessions.

    Returns
    -------
    tuple of Difference
        Clusters and jobs first, then users with sessions, by name, then the rest in the order of
        `new`.
    """
    of_user: dict[str, list[SessionUse]] = {}
    for session in sessions:
        of_user.setdefault(session.user, []).append(session)
    named = dict.fromkeys((*sorted(of_user), *_names(new), *_names(old), _UNNAMED_USER))
    before, after = Resolver(old), Resolver(new)
    found: dict[object, Difference] = {}
    for user in named:
        was, will = before.resolve(user), after.resolve(user)
        changes = tuple(_changes(was, will))
        if not changes:
            continue
        place = will.virtual_cluster if was.virtual_cluster == will.virtual_cluster else None
        consequences = tuple(_consequences(was, will, of_user.get(user, [])))
        # Users without individual consequences are grouped.
        key = (user,) if consequences else (place, changes)
        known = found.get(key, Difference((), place, changes, consequences))
        who = (*known.who, user if user != _UNNAMED_USER else "others")
        found[key] = Difference(who, place, changes, consequences)
    return (*_cluster_differences(old, new), *found.values())


def _names(policy: Policy) -> Iterator[str]:
    for cluster in policy.virtual_clusters:
        yield from (user.name for user in cluster.users)
        for group in cluster.groups:
            yield from group.members


def _cluster_differences(old: Policy, new: Policy) -> Iterator[Difference]:
    was, will = cluster_text(old.cluster), cluster_text(new.cluster)
    if was != will:
        yield Difference(("cluster",), None, (f"{was} -> {will}",))
    pauses = [value_text("grow_after", grow_after(each)) for each in (old, new)]
    if pauses[0] != pauses[1]:
        yield Difference(("jobs",), None, (f"{NAMES['grow_after']} {' -> '.join(pauses)}",))
    before = {each.name: each for each in old.virtual_clusters}
    after = {each.name: each for each in new.virtual_clusters}
    for name in dict.fromkeys((*after, *before)):
        who = (f"virtual cluster {name}",)
        if name not in before:
            yield Difference(who, None, (f"new, guaranteed {guarantee_text(after[name])}",))
        elif name not in after:
            yield Difference(who, None, (f"gone, with {guarantee_text(before[name])} guaranteed",))
        elif changes := tuple(_cluster_changes(before[name], after[name])):
            yield Difference(who, None, changes)


def _cluster_changes(was: VirtualCluster, will: VirtualCluster) -> Iterator[str]:
    for what, before, after in (
        ("guaranteed", guarantee_text(was), guarantee_text(will)),
        ("weight", f"{was.weight or 1:g}", f"{will.weight or 1:g}"),
        ("all together", quotas_text(limits(was.quotas)), quotas_text(limits(will.quotas))),
    ):
        if before != after:
            yield f"{what} {before} -> {after}"


def _changes(was: UserPolicy, will: UserPolicy) -> Iterator[str]:
    """Yield what changes for one user; for an unchanged tier, also the terms of the tier."""
    if was.admitted != will.admitted:
        yield "admitted" if will.admitted else "not admitted any more"
    if not will.admitted:
        return
    for key in ("virtual_cluster", "tier", "weight", "packing"):
        if (before := getattr(was, key)) != (after := getattr(will, key)):
            yield f"{NAMES[key]} {value_text(key, before)} -> {value_text(key, after)}"
    for key in QUOTAS:
        if (before := getattr(was.quotas, key)) != (after := getattr(will.quotas, key)):
            yield f"{NAMES[key]} {value_text(key, before)} -> {value_text(key, after)}"
    if was.tier != will.tier:
        return
    for key in TIER_TERMS:
        if (before := getattr(was.terms, key)) != (after := getattr(will.terms, key)):
            yield f"{NAMES[key]} {value_text(key, before)} -> {value_text(key, after)}"


def _consequences(
    was: UserPolicy, will: UserPolicy, sessions: Sequence[SessionUse]
) -> Iterator[str]:
    """Yield what a change means for what runs now; nothing that runs is taken away."""
    running = sum(session.running for session in sessions)
    if running:
        keep = "keeps its cell" if running == 1 else "keep their cells"
        yield f"{counted(running, 'running session')} {keep}"
    if not will.admitted:
        return
    for key in ("devices", "device_memory"):
        held = sum(getattr(session, key) for session in sessions)
        if held > getattr(will.quotas, key) and was.quotas != will.quotas:
            memory = f"{mebibytes_text(held)} of {NAMES[key]}"
            amount = counted(held, "device") if key == "devices" else memory
            yield f"has {amount} now, and gets no more until that is within the quota"
