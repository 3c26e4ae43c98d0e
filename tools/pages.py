"""The documentation as a site: pages of docs/ and a reference that is made from the code.

``python tools/pages.py DIRECTORY`` writes the sources of the site there; ``make docs`` builds it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jupyter_sing.cli import commands
from jupyter_sing.notebook import magics
from jupyter_sing.server.extension import SingExtension
from kernelproxy.provisioning.provisioner import SingProvisioner

ROOT = Path(__file__).resolve().parents[1]
#: Pages outside of docs/ that are part of the site.
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "BENCHMARKS.md")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def cli() -> Iterator[str]:
    """`jupyter sing`: the help of each verb."""
    yield "# Command line\n"
    yield from _helps(commands.parser())


def _helps(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {parser.prog}\n\n```\n{parser.format_help().strip()}\n```\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _helps(each)


def magic() -> Iterator[str]:
    """`%sing`: what it prints about itself."""
    yield f"# %sing\n\n```\n{magics.HELP}\n```\n"


def traits() -> Iterator[str]:
    """Options of the server extension and of the provisioner, with their help."""
    yield "# Options of jupyter_server_config.py\n"
    for owner in (SingExtension, SingProvisioner):
        yield f"## c.{owner.__name__}\n\n| option | meaning |\n|---|---|\n"
        for name, trait in sorted(owner.class_own_traits(config=True).items()):
            yield f"| `{name}` | {' '.join(trait.help.split())} |\n"


def rest() -> Iterator[str]:
    """REST, as openapi.yaml describes it."""
    described = yaml.safe_load((ROOT / "jupyter_sing/server/openapi.yaml").read_text("utf-8"))
    yield f"# REST\n\n{described['info']['description']}\n"
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            if method != "parameters":
                yield from _operation(f"{method.upper()} {path}", operation)
    yield "## Schemas\n\n"
    for name, schema in described["components"]["schemas"].items():
        text = yaml.safe_dump(schema, sort_keys=False, allow_unicode=True, width=100)
        yield f"### {name}\n\n```yaml\n{text}```\n\n"


def _operation(title: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"## {title}\n\n{operation.get('summary', '')}\n\n"
    for each in operation.get("parameters", []):
        if "name" in each:
            yield f"- `{each['name']}` ({each['in']}): {each.get('description', '')}\n"
    for status, response in operation["responses"].items():
        if "description" in response:
            yield f"- {status}: {response['description']}\n"
    yield "\n"


REFERENCE = {"cli": cli, "magic": magic, "options": traits, "rest": rest}


def page(text: str, pages: set[str]) -> str:
    """A page whose links stay within the site; those to other files become their names."""

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target:
            return found[0]
        name = target.removeprefix("../").removeprefix("docs/")
        return f"[{words}]({name}{anchor})" if name in pages else words

    return _LINK.sub(link, text)


def main(directory: Path) -> None:
    """Write the sources of the site."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(ROOT / "docs", directory)
    for name in ROOT_PAGES:
        shutil.copy(ROOT / name, directory / name)
    (directory / "reference").mkdir()
    for name, made in REFERENCE.items():
        (directory / "reference" / f"{name}.md").write_text("".join(made()), "utf-8")
    pages = {each.relative_to(directory).as_posix() for each in directory.rglob("*.*")}
    for each in directory.glob("*.md"):
        each.write_text(page(each.read_text("utf-8"), pages), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
