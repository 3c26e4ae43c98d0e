"""Numbers of a policy, as the engine uses them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from jupyter_sing.scheduler.policy.model import Policy
from jupyter_sing.scheduler.policy.resolve import (
    EffectiveQuotas,
    UserPolicy,
    grow_after,
    tier_terms,
)
from jupyter_sing.scheduler.settings import EngineSettings, QuotaLimits, Tier

_HOUR = 3600.0


def numbers(policy: Policy, users: Iterable[UserPolicy], base: EngineSettings) -> EngineSettings:
    """Convert a policy to settings.

    Parameters
    ----------
    users
        Effective policy of every user with sessions.
    base
        Settings that the policy does not contain.
    """
    found = list(users)
    terms = {tier: tier_terms(policy, tier) for tier in Tier}
    return replace(
        base,
        vc_weights={each.virtual_cluster: each.cluster_weight for each in found},
        user_weights={(each.virtual_cluster, each.user): each.weight for each in found},
        vc_limits={each.virtual_cluster: _limits(each.cluster_quotas) for each in found},
        user_limits={
            (each.virtual_cluster, each.user): (
                _limits(each.quotas) if each.admitted else QuotaLimits(devices=0)
            )
            for each in found
        },
        targets={tier: each.gpu_percent / 100.0 for tier, each in terms.items()},
        grow_after=grow_after(policy),
        max_hold={t: each.max_hold for t, each in terms.items() if each.max_hold < math.inf},
    )


def _limits(quotas: EffectiveQuotas) -> QuotaLimits:
    return QuotaLimits(quotas.devices, quotas.device_memory, quotas.gpu_hours_per_day * _HOUR)
