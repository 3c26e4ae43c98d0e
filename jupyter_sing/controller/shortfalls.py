"""Tier targets that a policy promises and this host cannot keep."""

from __future__ import annotations

from collections.abc import Iterable

from jupyter_sing.controller.effective_policy import HostPolicy
from jupyter_sing.scheduler.fairness.tier_targets import admit
from jupyter_sing.scheduler.settings import EngineSettings, Tier
from kernelproxy.common.scheduler_api import SessionDescription


def shortfalls(
    rules: HostPolicy,
    sessions: Iterable[SessionDescription],
    settings: EngineSettings,
    devices: int,
) -> list[str]:
    """Return for which sessions a policy has tier targets that cannot be kept here.

    Parameters
    ----------
    rules : HostPolicy
    sessions : iterable of SessionDescription
    settings : EngineSettings
        Of that policy.
    devices : int
        Number of devices of this host.
    """
    notes, demand = [], dict.fromkeys(Tier, 0.0)
    for terms in sessions:
        tier = rules.standing(terms.user, terms.tier).tier
        found = admit(tier, 1, demand, devices, devices, settings.targets)
        if found.kept:
            demand[tier] += settings.duty
            continue
        share = f"the {settings.targets[tier]:.0%} of the device time that {tier} promises"
        why = found.reason.partition(": ")[2]
        notes.append(f"{terms.name} of {terms.user} does not have {share}: {why}.")
    return notes
