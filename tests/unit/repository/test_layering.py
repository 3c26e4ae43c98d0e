"""Imports go one way: jupyter_sing -> kernelproxy, and kernels need nothing but torch."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STANDARD = set(sys.stdlib_module_names)

# Packages that run in kernels and workers, that is, in environments with torch but without our
# dependencies.
KERNEL_SIDE = {
    "kernelproxy/__init__.py", "kernelproxy/common", "kernelproxy/kernel", "kernelproxy/native",
    "kernelproxy/worker", "jupyter_sing/__init__.py", "jupyter_sing/notebook",
    # These run elsewhere, but have the same requirement.
    "kernelproxy/agent/supervisor/supervisor.py", "kernelproxy/criu/sandbox.py",
}  # fmt: skip


def imports(source: str) -> Iterator[str]:
    """Return the modules that a module requires.

    An import whose failure is handled is optional; one for type checkers is ignored.
    """
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Try) and any(_handles_missing(h) for h in node.handlers):
            waiting += [*node.handlers, *node.orelse, *node.finalbody]
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _handles_missing(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    return any(name in caught for name in ("ImportError", "ModuleNotFoundError", "Exception"))


def modules(*prefixes: str) -> list[Path]:
    files = [file for top in ("jupyter_sing", "kernelproxy") for file in (ROOT / top).rglob("*.py")]
    return sorted(
        file
        for file in files
        if any(
            (name := file.relative_to(ROOT).as_posix()) == prefix or name.startswith(f"{prefix}/")
            for prefix in prefixes
        )
    )


def outside(file: Path, allowed: set[str]) -> list[str]:
    """Imports of a file that are neither of the standard library nor below an allowed name."""
    return [
        name
        for name in imports(file.read_text("utf-8"))
        if name.split(".")[0] not in STANDARD
        and not any(name == known or name.startswith(f"{known}.") for known in allowed)
    ]


def test_imports_are_distinguished_from_optional_ones() -> None:
    source = (
        "import a.b\nfrom c import d\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import types_only\n"
        "try:\n    import optional\nexcept ImportError:\n    import e\n"
        "def f():\n    import g\n    try:\n        import h\n    finally:\n        pass\n"
    )
    assert set(imports(source)) == {"a.b", "c.d", "e", "g", "h", "typing.TYPE_CHECKING"}


SOURCES_MAX = 15
README_LINES_MAX = 15


def all_imports() -> dict[str, set[str]]:
    """Return for each of our modules all imports of our own modules, for any purpose."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in modules("jupyter_sing", "kernelproxy")
    }
    found = {}
    for name, file in files.items():
        named = set()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {each if each in files else str(node.module) for each in of}
        found[name] = named & files.keys()
    return found


def test_imports_run_in_no_circles() -> None:
    graph = all_imports()

    def reached_from(module: str) -> set[str]:
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    circling = {each for each in graph if each in reached_from(each)}
    assert circling == set()


def test_a_folder_is_small_and_documented() -> None:
    folders = {file.parent for file in modules("jupyter_sing", "kernelproxy")}
    folders -= {ROOT / "kernelproxy/hoststate"}  # aliases
    assert {each for each in folders if len([*each.glob("*.py")]) > SOURCES_MAX} == set()
    said = {each: each / "README.md" for each in folders}
    assert {each for each, page in said.items() if not page.is_file()} == set()
    lines = {each: page.read_text("utf-8").count("\n") for each, page in said.items()}
    assert {each: count for each, count in lines.items() if count > README_LINES_MAX} == {}


def test_a_table_of_a_package_names_its_modules() -> None:
    gone = {
        f"{file.parent.name}/{name}"
        for file in modules("jupyter_sing", "kernelproxy")
        if file.name == "__init__.py"
        for name in re.findall(r"^`([a-z_]+)`", file.read_text("utf-8"), re.MULTILINE)
        if not (file.parent / name).exists() and not file.with_name(f"{name}.py").exists()
    }
    assert gone == set()


def test_imported_packages_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=]", each)[0] for each in project["dependencies"]}
    # Torch belongs to the kernel's environment.
    distributions = {
        "yaml": "pyyaml",
        "zmq": "pyzmq",
        "torch": None,
        "IPython": "ipython",
        "pydantic_core": "pydantic",  # which requires exactly one version of it
    }
    imported = {
        name.split(".")[0]
        for file in modules("jupyter_sing", "kernelproxy")
        for name in imports(file.read_text("utf-8"))
    } - {*STANDARD, "jupyter_sing", "kernelproxy"}
    wanted = {distributions.get(each, each.replace("_", "-")) for each in imported} - {None}
    assert wanted <= declared


def test_kernelproxy_does_not_know_jupyter_sing() -> None:
    files = modules("kernelproxy")
    assert files
    wrong = {
        file.relative_to(ROOT).as_posix(): names
        for file in files
        if (names := [n for n in imports(file.read_text("utf-8")) if n.startswith("jupyter_sing")])
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "file", modules(*KERNEL_SIDE), ids=lambda f: f.relative_to(ROOT).as_posix()
)
def test_kernel_side_needs_only_torch(file: Path) -> None:
    ours = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in KERNEL_SIDE
        if not path.endswith("__init__.py")
    }
    extra = {
        "ipython_extension.py": {"IPython"},
        "magics.py": {
            "IPython",
            "jupyter_sing.lost_sessions",
        },  # in the function that runs if there is no daemon
        "compile_progress.py": {"IPython"},
        "progress_bar.py": {"IPython"},
        "widget.py": {"IPython"},
        "__init__.py": {
            "jupyter_sing.server.extension"
        },  # in the function that only a server calls
    }.get(file.name, set())
    if file.parent.name == "namespace":
        extra = {"cloudpickle"}  # the provisioner puts it on the path of kernels
    assert outside(file, {"torch", *ours, *extra}) == []


def test_scheduler_is_pure() -> None:
    forbidden = {"socket", "time", "random", "threading", "asyncio", "subprocess", "os"}
    seeded = "random.Random"  # the generator of workloads draws; where it is made, it has a seed
    allowed = {"policy": {"yaml", "pydantic", "pydantic_core"}}
    pure = {"jupyter_sing.scheduler", "jupyter_sing.simulator", "kernelproxy.common.units"}
    wrong = {
        file.name: names
        for file in modules("jupyter_sing/scheduler", "jupyter_sing/simulator")
        if (
            names := [
                *outside(file, {*pure, *allowed.get(file.parent.name, ())}),
                *(
                    n
                    for n in imports(file.read_text("utf-8"))
                    if n.split(".")[0] in forbidden and n != seeded
                ),
                *(["Random()"] if "Random()" in file.read_text("utf-8") else []),
            ]
        )
    }
    assert wrong == {}
