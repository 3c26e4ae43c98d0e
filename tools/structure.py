"""Structure check: sizes of folders, modules, classes and functions, and names that occur twice.

``python tools/structure.py`` prints each place over a limit; its exit status is 1 if there is any.
The exceptions are in ``structure.toml`` beside it, a table for each check, an entry with its reason
for each place. An entry that is no longer needed is reported, too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = ROOT / "tools/structure.toml"

FOLDER_SOURCES_MAX = 15
MODULE_LINES_MAX = 500
#: Of a module of tests: it follows the module under test, and is read test by test.
TEST_MODULE_LINES_MAX = 700
CLASS_LINES_MAX = 300
CLASS_ATTRIBUTES_MAX = 20
PARAMETERS_MAX = 8
FUNCTION_LINES_MAX = 70

SUFFIXES = (".py", ".h", ".cpp", ".ts", ".tsx")
#: Not part of the product: their classes may repeat one another's names, but not the product's.
HELPERS = ("tests/", "benchmarks/", "tools/")
_TESTS = re.compile(r"/test_\w+\.py$|\.spec\.ts$")
#: A note is defined where a line begins with its name, and text follows it.
_NOTE = re.compile(r"^[\s/*#\"]*Note \[([^\]]+)\][:.] +\S", re.MULTILINE)


@dataclass(frozen=True)
class Excess:
    """A place over a limit.

    Parameters
    ----------
    check : str
        Name of the check, and of its table of exceptions.
    place : str
        A name, a path, or ``path:name``.
    text : str
        Readable: what was found.
    """

    check: str
    place: str
    text: str


def findings(sources: Mapping[str, str]) -> Iterator[Excess]:
    """What is over a limit in some sources, given by path from the repository's root."""
    yield from _folders(sources)
    yield from _notes(sources)
    classes: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        lines = source.count("\n")
        most = TEST_MODULE_LINES_MAX if _TESTS.search(path) else MODULE_LINES_MAX
        if PurePosixPath(path).suffix in SUFFIXES and lines > most:
            yield Excess("modules", path, f"{lines} lines, more than {most}")
        if path.endswith(".py"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(path)
                    yield from _class(path, node)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from _function(path, node)
    for name, paths in sorted(classes.items()):
        product = [each for each in paths if not each.startswith(HELPERS)]
        if len(product) > 1:
            yield Excess("class-names", name, f"in {', '.join(product)}")
        elif product and len(paths) > 1:
            others = [each for each in paths if each not in product]
            yield Excess("doubles", name, f"of {product[0]}, also in {', '.join(others)}")


def _folders(sources: Mapping[str, str]) -> Iterator[Excess]:
    """Folders with many sources; a header and its source, a module and its spec count once."""
    stems: dict[str, set[str]] = defaultdict(set)
    for path in map(PurePosixPath, sources):
        if path.suffix in SUFFIXES and path.name != "__init__.py":
            stems[str(path.parent)].add(path.stem.removesuffix(".spec"))
    for folder, found in sorted(stems.items()):
        if len(found) > FOLDER_SOURCES_MAX:
            yield Excess("folders", folder, f"{len(found)} sources, more than {FOLDER_SOURCES_MAX}")


def _notes(sources: Mapping[str, str]) -> Iterator[Excess]:
    """Notes that are defined more than once."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for each in _NOTE.finditer(source):
            found[each.group(1)].append(path)
    for name, paths in sorted(found.items()):
        if len(paths) > 1:
            yield Excess("notes", name, f"in {', '.join(paths)}")


def _class(path: str, node: ast.ClassDef) -> Iterator[Excess]:
    """A class that is large; a `TypedDict` has the fields of what it describes, such as a reply."""
    place = f"{path}:{node.name}"
    lines = _lines(node)
    if lines > CLASS_LINES_MAX:
        yield Excess("classes", place, f"{lines} lines, more than {CLASS_LINES_MAX}")
    described = any("TypedDict" in ast.unparse(each) for each in node.bases)
    attributes = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not described
    }
    for each in node.body:
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        attributes |= {
            inner.attr
            for inner in ast.walk(each)
            if isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        }
        if each.name == "__init__":
            given = each.args.posonlyargs + each.args.args + each.args.kwonlyargs
            if len(given) - 1 > PARAMETERS_MAX:
                text = f"{len(given) - 1} parameters, more than {PARAMETERS_MAX}"
                yield Excess("constructors", place, text)
    if len(attributes) > CLASS_ATTRIBUTES_MAX:
        text = f"{len(attributes)} attributes, more than {CLASS_ATTRIBUTES_MAX}"
        yield Excess("attributes", place, text)


def _function(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Excess]:
    lines = _lines(node)
    if lines > FUNCTION_LINES_MAX:
        text = f"{lines} lines, more than {FUNCTION_LINES_MAX}"
        yield Excess("functions", f"{path}:{node.name}", text)


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None, "parsed from source"
    return node.end_lineno - node.lineno + 1


def unexpected(
    found: list[Excess], exceptions: Mapping[str, Mapping[str, str]]
) -> Iterator[Excess]:
    """Findings that are no exception, and exceptions that are not needed or give no reason."""
    places = {(each.check, each.place) for each in found}
    yield from (each for each in found if each.place not in exceptions.get(each.check, {}))
    for check, entries in exceptions.items():
        for place, reason in entries.items():
            if (check, place) not in places:
                yield Excess(check, place, "an exception that is not needed: delete it")
            elif not reason.strip():
                yield Excess(check, place, "an exception without a reason")


def sources() -> dict[str, str]:
    """The sources and pages of this repository, by path from its root."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {
        each: (ROOT / each).read_text("utf-8")
        for each in sorted(listed.stdout.splitlines())
        if each.endswith((*SUFFIXES, ".md")) and (ROOT / each).is_file()
    }


def main() -> int:
    """Check this repository."""
    found = list(findings(sources()))
    wrong = list(unexpected(found, tomllib.loads(EXCEPTIONS.read_text("utf-8"))))
    for each in wrong:
        print(f"{each.check}: {each.place}: {each.text}")
    counts = Counter(each.check for each in found)
    summary = ", ".join(f"{check} {count}" for check, count in sorted(counts.items()))
    print(f"{len(wrong)} unexpected; over a limit: {summary or 'nothing'}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
