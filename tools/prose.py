"""Prose check: docstrings, comments and pages use the terms of docs/glossary.md.

``python tools/prose.py [PATH ...]`` prints each place with an idiom of our own, a docstring that
begins with a relative clause, or a person who is "he"; its exit status is 1 if there is any. Names
in backticks are left alone.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Pages and data that quote others, or are written by a command.
EXCLUDED = ("LICENSE", "BENCHMARKS.md", "CHANGELOG.md", "docs/glossary.md", "tests/wire/recorded/")

IDIOMS = {
    r"\b(some|no|any)body\b": "name the party: user, caller, session, process",
    r"\bwho(m)?ever\b": "name the party",
    r"\bput(s|ting)? away\b|\btak(e|es|en|ing) out again\b": "save, spill / restore",
    r"\b(is|are|was|were|be|been|being) told\b": "is notified, receives",
    r"\b(go|goes|went|gone|going) on\b": "continue",
    r"\bwho (waits?|asks?|has|have|had|waited|asked)\b": "waiter, caller, holder",
    r"\bin hand\b": "owns",
    r"\b(hang|hangs|hung|hanging) up\b": "disconnect",
    r"\bis (no|not an) error\b": "idempotent",
    r"\b(hear|hears|heard)\b": "receive",
    r"\bwhat is so\b": "current state",
    r"\bfor people\b": "user-facing, readable",
    r"\bowned from now on\b": "takes ownership",
    r"\b(he|him|his|himself|she|her|hers|herself)\b": "they",
}
_IDIOM = re.compile("|".join(f"(?:{each})" for each in IDIOMS), re.IGNORECASE)
#: A docstring says first what the thing is, or does.
_OPENING = re.compile(r"(Who|Whom|Whose|What|Which|How|Where|When|Whether|With whom|That)\b")
_CODE = re.compile(r"``.*?``|`[^`]*`|\"[^\"\n]*\"|https?://\S+", re.DOTALL)


def python_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Docstrings and comments: line, text, and whether it is a module's or class's docstring."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node, clean=False)
        if text is not None:
            first = node.body[0]
            yield first.lineno, text, isinstance(node, ast.Module | ast.ClassDef)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def code_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Comments of C++ and TypeScript."""
    pattern = re.compile(r"(?<![:\"'])//[^\n]*|/\*.*?\*/", re.DOTALL)
    for found in pattern.finditer(source):
        yield source.count("\n", 0, found.start()) + 1, found.group(), False


def page_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Lines of a Markdown page outside of code."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line, False


READERS = {
    ".py": python_texts,
    ".h": code_texts,
    ".cpp": code_texts,
    ".ts": code_texts,
    ".tsx": code_texts,
    ".md": page_texts,
}


def findings(path: Path) -> Iterator[str]:
    """What is wrong with a file's prose, a line each."""
    reader = READERS[path.suffix]
    name = path.relative_to(ROOT)
    for line, text, names in reader(path.read_text("utf-8")):
        plain = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), text)
        for found in _IDIOM.finditer(plain):
            at = line + plain.count("\n", 0, found.start())
            term = next(
                term
                for each, term in IDIOMS.items()
                if re.fullmatch(each, found.group(), re.IGNORECASE)
            )
            yield f"{name}:{at}: {found.group()!r}: {term}"
        if names and (found := _OPENING.match(text.lstrip())):
            yield f"{name}:{line}: begins with {found.group()!r}: say what it is"


def main(arguments: list[str]) -> int:
    """Check the files that are given, or all that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [each for each in listed.stdout.splitlines() if not each.startswith(EXCLUDED)]
    files = [ROOT / each for each in paths if Path(each).suffix in READERS]
    found = [each for file in files if file.is_file() for each in findings(file)]
    print(*found, sep="\n")
    print(f"{len(found)} in {len(files)} files", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
