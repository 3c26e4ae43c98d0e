"""Prose check: texts, strings, identifiers and test names use the terms of docs/glossary.md.

``python tools/prose.py [PATH ...]`` prints each place and exits with 1 if there is any:

- an idiom of our own in a docstring, a comment, a page, or a string that users see: argparse help,
  errors, the texts of JupyterLab, descriptions in YAML and JSON;
- a docstring that begins with a relative clause, or a person who is "he";
- an identifier of the dialect that the code had, such as ``putback``;
- a test whose name begins with a pronoun instead of its subject.

Names in backticks are left alone.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Pages and data that quote others, or are written by a command.
EXCLUDED = (
    "LICENSE", "BENCHMARKS.md", "CHANGELOG.md", "docs/glossary.md", "tests/wire/recorded/",
    "labextension/package", "labextension/tsconfig", "labextension/install",
    "tools/prose.py", "tests/unit/repository/test_prose.py",
)  # fmt: skip
#: Files whose strings users see.
PRODUCT = ("jupyter_sing/", "kernelproxy/", "labextension/")

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
_COMMENT = re.compile(r"(?<![:\"'])//[^\n]*|/\*.*?\*/", re.DOTALL)
_LITERAL = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"|`[^`]*`")
#: Shorter strings are names and patterns.
_SENTENCE_WORDS_MIN = 3
#: Words of identifiers, alone or as a part of one, and the term of the field.
DIALECT = {
    "agenda": "timers",
    "attendant": "kernel host",
    "desk": "I/O buffer",
    "desks": "pool of I/O buffers",
    "hands": "actions",
    "hungup": "disconnected",
    "keeper": "supervisor",
    "knock": "request a process",
    "knocked": "a process is requested",
    "knocking": "requests a process",
    "knocks": "requests a process",
    "people": "users",
    "putback": "restored files",
    "rides": "guest",
    "scribe": "writer",
    "stuck": "failed, remains",
    "switchboard": "ZMQ proxy",
    "tend": "serve, manage; what is due",
    "tended": "managed",
    "tender": "process manager",
    "whereabouts": "object path",
}
#: The same in the product alone: tests still use some of these.
PRODUCT_DIALECT = {
    "askers": "waiters",
    "begun": "started",
    "everybody": "all users, all sessions",
    "hear": "receive",
    "heard": "received",
    "hearing": "receiving",
    "hears": "receives",
    "looks": "checks",
    "nobody": "no user, no session",
    "patience": "pause, time limit",
    "promise": "guarantee",
    "promises": "guarantees",
    "said": "text, sent, logged",
    "somebody": "a user, a session",
    "told": "notified, reported",
    "wish": "request",
    "wished": "requested",
    "wishes": "requests",
}
#: Identifiers that other versions or the disk know.
ON_THE_WIRE = frozenset({"CheckpointBegun", "Knock", "Tend", "tended"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: A test is called after its subject, and what is expected of it.
_TEST_OPENING = re.compile(
    r"test_(it|one|what|who|whom|whose|whoever|which|how|where|when|that|those|"
    r"nobody|somebody|anybody|everybody)_"
)


def python_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield docstrings and comments: line, text, and whether it is a module's or a class's."""
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
    """Yield the comments of C++ and TypeScript."""
    for found in _COMMENT.finditer(source):
        yield source.count("\n", 0, found.start()) + 1, found.group(), False


def page_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the lines of a Markdown page outside of code."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line, False


def notebook_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the text cells of a notebook."""
    for cell in json.loads(source)["cells"]:
        if cell["cell_type"] == "markdown":
            yield 1, "".join(cell["source"]), False


def data_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the lines of YAML or JSON."""
    for number, line in enumerate(source.splitlines(), 1):
        yield number, line.replace('"', " "), False


READERS = {
    ".py": python_texts,
    ".h": code_texts,
    ".cpp": code_texts,
    ".ts": code_texts,
    ".tsx": code_texts,
    ".md": page_texts,
    ".ipynb": notebook_texts,
    ".json": data_texts,
    ".yaml": data_texts,
}


def python_strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield string literals that are sentences; a value in an f-string is a dash."""
    tree = ast.parse(source)
    other: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            other.add(node.value)  # a docstring
        elif isinstance(node, ast.JoinedStr):
            other.update(node.values)
            parts = [e.value if isinstance(e, ast.Constant) else "-" for e in node.values]
            yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in other:
            yield node.lineno, node.value


def script_strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the string literals of TypeScript."""
    plain = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), source)
    for found in _LITERAL.finditer(plain):
        yield plain.count("\n", 0, found.start()) + 1, found.group()[1:-1]


STRINGS = {".py": python_strings, ".ts": script_strings, ".tsx": script_strings}


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield the names in a Python module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def _idioms(line: int, text: str) -> Iterator[tuple[int, str]]:
    """Find idioms in a text that begins at a line."""
    plain = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), text)
    for found in _IDIOM.finditer(plain):
        term = next(
            term for each, term in IDIOMS.items() if re.fullmatch(each, found.group(), re.I)
        )
        yield line + plain.count("\n", 0, found.start()), f"{found.group()!r}: {term}"


def name_findings(source: str, dialect: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Find identifiers of the dialect, and names of tests that do not say their subject."""
    for line, identifier in identifiers(source):
        words = {each.lower() for each in _WORD.findall(identifier)}
        for word in sorted(words & dialect.keys()):
            if identifier not in ON_THE_WIRE:
                yield line, f"{identifier}: {dialect[word]}"
        if _TEST_OPENING.match(identifier):
            yield line, f"{identifier}: begin with the subject of the test"


def findings(path: Path) -> Iterator[str]:
    """Yield the places in a file, a line each."""
    name = path.relative_to(ROOT).as_posix()
    source = path.read_text("utf-8")
    found: list[tuple[int, str]] = []
    for line, text, begins in READERS[path.suffix](source):
        found += _idioms(line, text)
        if begins and (opening := _OPENING.match(text.lstrip())):
            found.append((line, f"begins with {opening.group()!r}: say what it is"))
    if path.suffix in STRINGS and name.startswith(PRODUCT):
        for line, text in STRINGS[path.suffix](source):
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= _SENTENCE_WORDS_MIN:
                found += _idioms(line, text)
    if path.suffix == ".py":
        is_product = name.startswith(PRODUCT)
        found += name_findings(source, DIALECT | PRODUCT_DIALECT if is_product else DIALECT)
    for line, text in sorted(found):
        yield f"{name}:{line}: {text}"


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
