"""``jupyter sing policy …``: policy files on the command line."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from jupyter_sing import queries
from jupyter_sing.controller.guarantees import leaves
from jupyter_sing.notebook.status_text import Table
from jupyter_sing.scheduler.fairness.tier_targets import most
from jupyter_sing.scheduler.policy import (
    Policy,
    PolicyError,
    UserPolicy,
    configuration,
    document,
    parse,
    resolve,
)
from jupyter_sing.scheduler.policy.model import UserTerms, VirtualCluster
from jupyter_sing.scheduler.policy.phrases import (
    NAMES,
    cluster_text,
    guarantee_text,
    quotas_text,
    value_text,
)
from jupyter_sing.scheduler.policy.resolve import (
    DEFAULT_VIRTUAL_CLUSTER,
    QUOTAS,
    TIER_TERMS,
    grow_after,
    limits,
    tier_terms,
)
from jupyter_sing.scheduler.policy.yaml_reader import TEXT_BYTES_MAX
from jupyter_sing.scheduler.settings import EngineSettings, Tier
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.protocol import PolicyApplied, SetPolicy
from kernelproxy.devices import configured_devices

NAMES_SHOWN_MAX = 4
ANSWER_SECONDS_MAX = 30.0


def add_verbs(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Add ``policy`` and its verbs; called once, for the parser of the CLI."""
    text = "check, show or apply a policy: which users may use which devices"
    policy = verbs.add_parser("policy", help=text, description=text)
    actions = policy.add_subparsers(title="verbs", required=True, metavar="VERB")
    check_text = "check a policy file and show its errors"
    checking = actions.add_parser(
        "check", parents=[common], help=check_text, description=check_text
    )
    checking.set_defaults(function=check)
    checking.add_argument("file", help="policy file, YAML")
    show_text = "show what each user gets by a policy"
    showing = actions.add_parser("show", parents=[common], help=show_text, description=show_text)
    showing.set_defaults(function=show)
    showing.add_argument(
        "file",
        nargs="?",
        help="policy file, YAML (default: the policy in force, else the built-in one)",
    )
    showing.add_argument(
        "--user",
        metavar="NAME",
        help="show only this user, with the lines of the policy that apply",
    )
    apply_text = "apply a policy now, and at every later start of the daemon"
    applying = actions.add_parser(
        "apply", parents=[common], help=apply_text, description=apply_text
    )
    applying.set_defaults(function=apply)
    applying.add_argument("file", help="policy file, YAML")
    applying.add_argument(
        "--dry-run", action="store_true", help="only show which users would be affected"
    )


def check(options: argparse.Namespace) -> int:
    """``policy check FILE``: report the error in one line."""
    read_policy(options.file)
    if options.json:
        print(json.dumps({"message": "ok", "file": options.file}, indent=1))
    else:
        print(f"{options.file}: ok")
    return 0


def show(options: argparse.Namespace) -> int:
    """``policy show [FILE] [--user NAME]``: without a file, the policy in force."""
    policy = standing_policy() if options.file is None else read_policy(options.file)
    if options.user is not None:
        found = resolve(policy, options.user)
        print(json.dumps(effective_document(found), indent=1) if options.json else _user(found))
    elif options.json:
        print(json.dumps({"policy": document(policy)}, indent=1))
    else:
        print(_all(policy))
    return 0


def apply(options: argparse.Namespace) -> int:
    """``policy apply FILE``: print the affected users, then apply it."""
    text = _read(options.file)
    _parsed(options.file, text)
    policy = text.decode("utf-8")
    with connect() as control:
        found = _applied(control, options.file, SetPolicy(policy, dry=True))
        if not options.json:
            for each in found.affected:
                print(each["text"])
            for note in found.notes:
                print(note)
            sys.stdout.flush()
        if options.dry_run:
            message = "Nothing was applied." if found.affected else "Nothing would change."
        else:
            found = _applied(control, options.file, SetPolicy(policy))
            message = f"{options.file} is applied."
            if not found.affected:
                message = f"Nothing changes. {message}"
    if options.json:
        print(json.dumps({"message": message, **asdict(found)}, indent=1))
    else:
        print(message)
    return 0


def _applied(control: Control, file: str, request: SetPolicy) -> PolicyApplied:
    try:
        return control.expect(PolicyApplied, request, timeout=ANSWER_SECONDS_MAX)
    except ControlError as error:
        if error.reason != "bad-policy":
            raise
        raise ControlError(f"{file}: {error}", error.reason) from None


def standing_policy() -> Policy:
    """Return the policy in force; raises as `queries.standing_policy_text`."""
    text = queries.standing_policy_text()
    return _parsed("The policy that was applied", text.encode()) if text else Policy()


def read_policy(file: str) -> Policy:
    """Read a policy file.

    Raises
    ------
    ControlError
        If it is not a valid policy: the file's name, and one line.
    OSError
        If the file cannot be read.
    """
    return _parsed(file, _read(file))


def _read(file: str) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(TEXT_BYTES_MAX + 1)  # one byte more shows that it is too large


def _parsed(what: str, text: bytes) -> Policy:
    try:
        return parse(text)
    except PolicyError as error:
        raise ControlError(f"{what}: {error}", "bad-policy") from None


def effective_document(found: UserPolicy) -> dict[str, Any]:
    """Return a user's effective policy as JSON values; null: no limit, or never."""
    plain = asdict(found)
    for key in ("quotas", "cluster_quotas", "terms"):
        plain[key] = {k: None if v == math.inf else v for k, v in plain[key].items()}
    return plain


def _user(found: UserPolicy) -> str:
    """Return a user's effective policy as text, with the lines that decided it."""
    values = {
        "virtual_cluster": found.virtual_cluster,
        "tier": found.tier,
        "weight": found.weight,
        "packing": found.packing,
        **{f"quotas.{key}": getattr(found.quotas, key) for key in QUOTAS},
        **{key: getattr(found.terms, key) for key in TIER_TERMS},
    }
    rows = []
    for each in found.decided:
        key = each.key.removeprefix("quotas.")
        line = "" if each.line is None else f" (line {each.line})"
        where = "built in" if each.path is None else f"{each.path}{line}"
        rows.append((NAMES[key], value_text(key, values[each.key]), where))
    who = found.user if found.group is None else f"{found.user}, of group {found.group}"
    text = f"{who}\n\n{Table(('setting', 'value', 'decided by'), rows)}"
    if found.admitted:
        return text
    return f"{found.user} is not admitted: others.admitted is false."


def _all(policy: Policy) -> str:
    """Return the whole policy as text, with built-in values where it sets none."""
    tiers = [
        (
            tier.value,
            *(value_text(key, getattr(tier_terms(policy, tier), key)) for key in TIER_TERMS),
        )
        for tier in Tier
    ]
    described = list(policy.virtual_clusters)
    home = policy.others.virtual_cluster or DEFAULT_VIRTUAL_CLUSTER
    admitted = policy.others.admitted is not False
    if admitted and home not in (each.name for each in described):
        described.append(VirtualCluster(name=home))
    clusters = [
        (
            each.name,
            guarantee_text(each),
            f"{each.weight or 1:g}",
            quotas_text(limits(each.quotas)),
        )
        for each in described
    ]
    users = [row for each in described for row in _user_rows(each)]
    others = _terms_text(policy.others) if admitted else "not admitted"
    users.append((home if admitted else "", "others", others))
    users.append(("", "all users", _terms_text(policy.defaults)))
    parts = [
        f"cluster: {cluster_text(policy.cluster)}",
        f"{Table(('tier', *(NAMES[key] for key in TIER_TERMS)), tiers)}{_guarantees(policy)}",
        f"jobs: {NAMES['grow_after']} {value_text('grow_after', grow_after(policy))}",
        Table(("virtual cluster", "guaranteed", "weight", "all together"), clusters),
        Table(("virtual cluster", "users", "terms"), users),
    ]
    return "\n\n".join(str(part) for part in parts)


def _guarantees(policy: Policy) -> str:
    """Return how many sessions of each tier can be guaranteed; "" if none is guaranteed."""
    targets = {tier: tier_terms(policy, tier).gpu_percent / 100.0 for tier in Tier}
    if not any(targets.values()):
        return ""
    count = _devices(policy)
    where = f"{count} device{'' if count == 1 else 's'}"
    found = " or ".join(
        f"{most(tier, count, targets, EngineSettings().duty):,} {tier}"
        for tier in Tier
        if targets[tier] > 0.0
    )
    return (
        f"\n\nOn {where}, {found} sessions can have that guarantee at the same time.\n"
        "Further sessions run without a guarantee. Their status shows it."
    )


def _devices(policy: Policy) -> int:
    """Count the devices that a policy describes, or else those of this machine."""
    if (found := configuration(policy)) is not None:
        return sum(len(leaves(cell)) for cell in found.cells)
    return len(configured_devices())


def _user_rows(cluster: VirtualCluster) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each user of a virtual cluster; users without terms share one row."""
    given = [(user.name, _terms_text(user)) for user in cluster.users]
    yield from ((cluster.name, name, text) for name, text in given if text)
    if silent := [name for name, text in given if not text]:
        yield cluster.name, _some(silent), ""
    for group in cluster.groups:
        yield cluster.name, f"{group.name}: {_some(group.members)}", _terms_text(group)
    if text := _terms_text(cluster.each):
        yield cluster.name, "each", text


def _some(names: Sequence[str]) -> str:
    """Join a few names, with the number of the others."""
    shown = list(names)
    if len(shown) > NAMES_SHOWN_MAX:
        shown[NAMES_SHOWN_MAX:] = [f"{len(shown) - NAMES_SHOWN_MAX} more"]
    return ", ".join(shown)


def _terms_text(terms: UserTerms) -> str:
    """Return terms as text."""
    given = [(key, getattr(terms, key)) for key in ("tier", "weight", "packing")]
    given += [(key, getattr(terms.quotas, key)) for key in QUOTAS]
    return ", ".join(
        f"{NAMES[key]} {value_text(key, value)}" for key, value in given if value is not None
    )
