"""Steps: the same numbers as plain torch on the same device.

Some kernels add in no fixed order: two runs of plain torch differ, too. That difference is measured
first, and is the floor below which a difference says nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.gpu import families
from benchmarks.gpu.judging import judged, need, need_gpu, objects
from benchmarks.gpu.processes import FailedError, Suite

PROGRAMS = ("mlp", "cnn", "transformer", "lstm", "gru")
TRANSFORMERS = ("gpt2", "llama", "bert")
#: Behaviours after which a CUDA context is unusable: kernels fail assertions in them.
FAULTS = (
    "indices_out_of_range",
    "values_that_do_not_fit",
    "a_failure_does_not_spread",
    "sparse_tensors_that_cannot_be",
)
#: Times the floor, and the part of the largest value that rounding may cost: the client may choose
#: another kernel than plain torch does, as docs/gpu.md says for batch norm and recurrent networks.
FLOORS, ROUNDING = 10.0, 2e-3
#: CUDA's fused cells, which a software device imitates, and the CPU's kernels for whole layers.
CELLS, CELLS_ROUNDING = ("lstm", "gru"), 1e-5


def _computed(
    suite: Suite, env: dict[str, str], names: Sequence[str], *, proxied: bool
) -> dict[str, list[torch.Tensor] | str]:
    """Let a side compute all families; return the results, or the error, of each.

    An error ends the side, as the device may be lost there: another one computes the rest.
    """
    found: dict[str, list[torch.Tensor] | str] = {}
    file = suite.scratch / f"family-{threading.get_ident()}.pt"
    left = list(names)
    while left:
        with suite.side(env, proxied=proxied) as side:
            while left:
                name = left.pop(0)
                try:
                    side.order("family", name=name, file=str(file))
                    found[name] = torch.load(file)
                except FailedError as error:
                    found[name] = str(error)
                    break
    return found


def operator_families(suite: Suite) -> tuple[str, list[str], Any]:
    """Compare one computation of each family of operators with plain torch."""
    # The CPU draws dropout's masks by another operator than CUDA.
    names = [name for name in families.FAMILIES if suite.gpu or "dropout" not in name]
    plain = suite.environment()
    with ThreadPoolExecutor() as threads, suite.daemon(suite.devices()) as env:
        pair = [threads.submit(_computed, suite, plain, names, proxied=False) for _ in range(2)]
        other = _computed(suite, env, names, proxied=True)
        one, two = (each.result() for each in pair)
    rows, wrong, equal, absent = [], {}, 0, []
    for name in names:
        first, second, third = one[name], two[name], other[name]
        if isinstance(first, str) or isinstance(second, str):
            absent.append(name)  # plain torch cannot compute it here either
            continue
        if isinstance(third, str):
            wrong[name] = third
            continue
        floor, apart = families.difference(first, second), families.difference(first, third)
        equal += apart == 0.0
        if apart > max(FLOORS * floor, ROUNDING):
            wrong[name] = f"differs by {apart:.1e}; plain from plain by {floor:.1e}"
        rows.append(f"| {name} | {floor:.1e} | {apart:.1e} |")
    table = ["| family | plain from plain | proxied from plain |", "|---|---|---|", *rows]
    text = f"{equal} of {len(names)} bit for bit"
    text += f"; not here in plain torch either: {', '.join(absent)}" if absent else ""
    return _with_table(text, len(names) - len(absent), wrong, table)


def _with_table(
    text: str, count: int, wrong: dict[str, str], table: list[str]
) -> tuple[str, list[str], Any]:
    try:
        return f"{text}; {judged(count, wrong)}", table, None
    except FailedError as error:
        raise FailedError(f"{text}; {error}", table) from None


def surface(suite: Suite) -> str:
    """Check the parts of `torch.cuda` that programs expect."""
    with suite.daemon(suite.devices("2GiB")) as env:
        printed = suite.run(*suite.proxied("tests/programs/operators/surface.py"), env=env)
    found = objects(printed)
    return judged(len(found), {each["name"]: each["error"] for each in found if each["error"]})


def behaviours(suite: Suite) -> tuple[str, list[str], Any]:
    """Compare the results of all behaviours; those on which plain torch disagrees are left out."""
    need_gpu(suite)
    need("numpy")
    files = {side: suite.scratch / f"{side}.pt" for side in ("plain", "again", "proxied")}
    module = (sys.executable, "-m", "tests.programs.operators.behaviours")
    arguments = ("--device", "cuda", "--leave-out", *FAULTS, "--save")
    for side in ("plain", "again"):
        suite.run(*module, *arguments, files[side], label=side)
    with suite.daemon(suite.devices()) as env:
        program = suite.proxied("tests/programs/operators/behaviours.py", *arguments)
        suite.run(*program, str(files["proxied"]), env=env, label="proxied")

    def compared(other: str) -> dict[str, str]:
        pair = (files["plain"], files[other])
        found = objects(suite.run(*module, "--compare", *pair, label=f"comparison-{other}"))
        return {each["name"]: "" if each["ok"] else each["message"] for each in found}

    floor, found = compared("again"), compared("proxied")
    unstable = {name for name, message in floor.items() if message}
    # Plain torch raises an error there.
    absent = {name for name, message in found.items() if message.startswith(": 'raised")}
    left = {name: text for name, text in found.items() if name not in unstable | absent}
    wrong = {name: text for name, text in left.items() if text}
    text = f"plain torch differs from itself in {len(unstable)}, raises errors in {len(absent)}"
    table = ["| behaviour | difference |", "|---|---|"]
    table += [f"| {name} | {text.splitlines()[0][:200]} |" for name, text in wrong.items()]
    return _with_table(text, len(left), wrong, table)


def training(suite: Suite) -> tuple[str, list[str], Any]:
    """Train programs on both sides; compare losses and what language models generate."""
    names = [*PROGRAMS, *(TRANSFORMERS if suite.transformers else ())]
    options = ["--steps", "8", *names]
    program = "tests/programs/training/training.py"
    module = (sys.executable, "-m", "tests.programs.training.training", "--device", suite.plain)

    def plain(label: str) -> dict[str, Any]:
        return {e["name"]: e for e in objects(suite.run(*module, *options, label=label))}

    one, two = plain("plain"), plain("again")
    with suite.daemon(suite.devices()) as env:
        printed = suite.run(
            *suite.proxied(program, "--device", "cuda", *options), env=env, label="proxied"
        )
    other = {e["name"]: e for e in objects(printed)}
    rows, wrong, equal = [], {}, 0
    for name in names:
        if name not in one or name not in other:
            wrong[name] = "did not run"
            continue
        floor, apart = (
            _loss_difference(one[name], two[name]),
            _loss_difference(one[name], other[name]),
        )
        equal += apart == 0.0
        rounding = ROUNDING if suite.gpu else CELLS_ROUNDING if name in CELLS else 0.0
        if apart > max(FLOORS * floor, rounding):
            wrong[name] = f"losses differ by {apart:.1e}; plain from plain by {floor:.1e}"
        elif apart == 0.0 and one[name].get("tokens") != other[name].get("tokens"):
            wrong[name] = "tokens differ"
        rows.append(f"| {name} | {floor:.1e} | {apart:.1e} |")
    table = ["| program | plain from plain | proxied from plain |", "|---|---|---|", *rows]
    return _with_table(f"{equal} of {len(names)} bit for bit", len(names), wrong, table)


def _loss_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest relative difference of two lists of losses."""
    pairs = [[float.fromhex(loss) for loss in each["losses"]] for each in (one, other)]
    return max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(*pairs, strict=True))
