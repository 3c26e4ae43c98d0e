"""The policy of an administrator, as a file: parsing, checks, queries and comparison.

``parse`` makes a `Policy` of YAML text or raises `PolicyError` with one line; ``dump`` writes it
back; ``resolve`` returns what applies to a user; ``configuration`` what is guaranteed, as cells;
``differences`` which users another policy would affect. All are pure. `document.schema` makes
``policy.schema.json``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from jupyter_sing.scheduler.policy.checks import check
from jupyter_sing.scheduler.policy.diff import Difference, SessionUse, differences
from jupyter_sing.scheduler.policy.document import validated, written
from jupyter_sing.scheduler.policy.errors import PolicyError
from jupyter_sing.scheduler.policy.guaranteed import configuration
from jupyter_sing.scheduler.policy.model import Policy
from jupyter_sing.scheduler.policy.resolve import Resolver, UserPolicy, resolve
from jupyter_sing.scheduler.policy.values import extended
from jupyter_sing.scheduler.policy.yaml_reader import lines, read, resolved

__all__ = [
    "Difference",
    "Policy",
    "PolicyError",
    "Resolver",
    "SessionUse",
    "UserPolicy",
    "configuration",
    "differences",
    "document",
    "dump",
    "parse",
    "resolve",
]


def parse(text: str | bytes) -> Policy:
    """Read a policy.

    Parameters
    ----------
    text : str or bytes
        YAML, in UTF-8.

    Returns
    -------
    Policy
        What the text says, without defaults.

    Raises
    ------
    PolicyError
        If it is no policy, contradicts itself, or guarantees more than there is.
    """
    root = read(text)
    policy: Policy = extended(Policy, validated(root), lines=MappingProxyType(lines(root)))
    check(policy)
    return policy


def document(policy: Policy) -> dict[str, Any]:
    """Convert a policy to JSON values; `parse` reads the result, since JSON is YAML."""
    return written(policy)


def dump(policy: Policy) -> str:
    """Write a policy as text of which `parse` makes the same policy."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Also quotes text that YAML 1.2 would read as another type, such as ``1e5``."""

    def text_node(dumper: Dumper, text: str) -> yaml.Node:
        style = None if resolved(text) == text else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, text_node)
    return yaml.dump(
        document(policy), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100
    )
