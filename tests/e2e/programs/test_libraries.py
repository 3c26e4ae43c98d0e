"""Programs of libraries have the same results on the proxied device as without it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import RunProgram, daemon_directory
from tests.decorated import decorated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TESTS = Path(__file__).resolve().parents[2]
PROGRAM = TESTS / "programs" / "libraries.py"
ENVIRONMENT = {
    # The same number of threads on both sides, since it decides how sums are split.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JUPYTER_SING_DEVICES": "cpu:4GiB@1",
    # Snapshots rely on write sets.
    "SING_CHECK_WRITES": "1",
    # No requests to the network, and no telemetry.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_TELEMETRY": "1",
    "WANDB_DISABLED": "true",
    "TOKENIZERS_PARALLELISM": "false",
}

Results = dict[str, dict[str, Any]]


NAMES = [
    (path.stem, name)
    for path in sorted((TESTS / "libraries").glob("*.py"))
    for name in decorated(path, "program")
]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[Callable[[str], tuple[Results, Results]]]:
    """Run a module of programs plainly and proxied, once; all modules share a daemon."""
    known: dict[str, tuple[Results, Results]] = {}

    def run(module: str, device: str) -> Results:
        # Some libraries write to their working directory.
        env = {**ENVIRONMENT, "HF_HOME": str(tmp_path_factory.mktemp("hub"))}
        done = run_program(PROGRAM, module, device, proxied=device == "cuda", env=env)
        found = [
            json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')
        ]
        return {result["name"]: result for result in found}

    def both(module: str) -> tuple[Results, Results]:
        if module not in known:
            known[module] = run(module, "cpu"), run(module, "cuda")
        return known[module]

    runtime_dir = tmp_path_factory.mktemp("libraries") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        yield both


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m}-{n}" for m, n in NAMES])
def test_program(results: Callable[[str], tuple[Results, Results]], module: str, name: str) -> None:
    plain, proxied = (side[name] for side in results(module))
    for side, found in (("plain", plain), ("proxied", proxied)):
        if found["error"]:
            pytest.fail(f"{side}: {found['error']}", pytrace=False)
    different = list(differences("", plain["values"], proxied["values"], plain["allowed"]))
    if different:
        pytest.fail("\n".join(different), pytrace=False)


def differences(where: str, plain: Any, proxied: Any, allowed: list[float]) -> Iterator[str]:
    """Describe each difference between two results, and where in the result it is."""
    if type(plain) is not type(proxied):
        yield f"{where}: {plain!r} became {proxied!r}"
    elif isinstance(plain, list):
        if len(plain) != len(proxied):
            yield f"{where}: {len(plain)} results became {len(proxied)}"
        for index, (one, other) in enumerate(zip(plain, proxied, strict=False)):
            yield from differences(f"{where}[{index}]", one, other, allowed)
    elif isinstance(plain, dict) and "items" in plain:
        if list(plain["items"]) != list(proxied["items"]):
            yield f"{where}: keys {list(plain['items'])} became {list(proxied['items'])}"
        for key in plain["items"].keys() & proxied["items"].keys():
            yield from differences(
                f"{where}[{key!r}]", plain["items"][key], proxied["items"][key], allowed
            )
    elif isinstance(plain, dict) and "float" in plain and "float" in proxied:
        one, other = (float.fromhex(value["float"]) for value in (plain, proxied))
        if plain != proxied and not abs(one - other) <= allowed[0] * abs(one):
            yield f"{where}: {one!r} became {other!r} ({abs(one - other) / abs(one):.1e})"
    elif isinstance(plain, dict) and plain.get("tensor") == proxied.get("tensor"):
        yield from tensor_differences(where, plain, proxied, allowed[1])
    elif plain != proxied:
        yield f"{where}: {plain!r} became {proxied!r}"


def tensor_differences(
    where: str, plain: dict[str, Any], proxied: dict[str, Any], relative: float
) -> Iterator[str]:
    """Describe how two tensors of one type differ."""
    if plain["shape"] != proxied["shape"]:
        yield f"{where}: shape {plain['shape']} became {proxied['shape']}"
    elif plain["data"] != proxied["data"]:
        one, other = (
            np.frombuffer(base64.b64decode(value["data"]), value["wide"])
            for value in (plain, proxied)
        )
        room = relative * float(np.abs(one).max()) if plain["wide"] == "float64" else 0.0
        far = ~(np.abs(one - other) <= room) & ~(np.isnan(one) & np.isnan(other))
        if far.any():
            first = int(far.argmax())
            yield (
                f"{where}: {int(far.sum())} of {far.size} values differ: "
                f"{one[first]!r} became {other[first]!r} (largest {float(np.abs(one).max())!r})"
            )
