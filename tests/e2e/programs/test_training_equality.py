"""Training has the same results on the proxied device as on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunProgram, daemon_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "training" / "training.py"
STEPS = 12

# On CUDA, torch trains these with fused cells (`_thnn_fused_lstm_cell`), on the CPU with a whole
# fused layer (`mkldnn_rnn_layer`) or separate operators: other kernels, other rounding.
OTHER_KERNELS = {"lstm", "gru"}
SAME_KERNELS = {"mlp", "cnn", "transformer"}
TRANSFORMERS = {"gpt2", "llama", "bert"}
NAMES = sorted(OTHER_KERNELS | SAME_KERNELS | TRANSFORMERS)

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def both(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    run_program: RunProgram,
) -> Iterator[tuple[Results, Results]]:
    """Return the results of the CPU and of the proxied device, with the same number of threads."""
    threads = request.param
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env["JUPYTER_SING_DEVICES"] = f"cpu:2GiB@{threads}"
    env["SING_CHECK_WRITES"] = str(int(threads == 1))  # of operators: snapshots rely on them

    def run(device: str, proxied: bool) -> Results:
        arguments = ["--device", device, "--steps", str(STEPS), *NAMES]
        done = run_program(PROGRAM, *arguments, proxied=proxied, env=env)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {result["name"]: result for result in found}

    runtime_dir = tmp_path_factory.mktemp("equality") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        yield run("cpu", proxied=False), run("cuda", proxied=True)


def losses(results: Results, name: str) -> list[float]:
    return [float.fromhex(loss) for loss in results[name]["losses"]]


@pytest.mark.parametrize("name", sorted(SAME_KERNELS))
def test_losses_are_equal_bit_for_bit(both: tuple[Results, Results], name: str) -> None:
    plain, proxied = both
    assert len(plain[name]["losses"]) == STEPS
    assert len(set(plain[name]["losses"])) == STEPS  # it trains: all losses differ
    assert proxied[name]["losses"] == plain[name]["losses"]


@pytest.mark.parametrize("name", sorted(OTHER_KERNELS))
def test_losses_of_fused_recurrent_cells_differ_by_rounding_only(
    both: tuple[Results, Results], name: str
) -> None:
    plain, proxied = both
    assert losses(proxied, name) == pytest.approx(losses(plain, name), rel=1e-6, abs=0)


@pytest.mark.parametrize("name", sorted(TRANSFORMERS))
def test_transformers_train_and_generate_the_same_tokens(
    both: tuple[Results, Results], name: str
) -> None:
    plain, proxied = both
    assert losses(proxied, name) == pytest.approx(losses(plain, name), rel=1e-6, abs=0)
    assert plain[name]["tokens"]
    assert proxied[name]["tokens"] == plain[name]["tokens"]
