"""The steps of the GPU suite.

Each is a function of a `Suite` that returns its result, as a text or as a text with a table and
figures, or raises `FailedError` or `SkippedError`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.processes import (
    ROOT,
    FailedError,
    GpuProcessSide,
    SkippedError,
    Suite,
    has_module,
    tail_of,
)
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Resume, SessionReply, StatusReply, StatusRequest, Suspend

PROGRAMS = ("mlp", "cnn", "transformer", "lstm", "gru")
TRANSFORMERS = ("gpt2", "llama", "bert", "gpt2 generation")
#: Behaviours after which a CUDA context is unusable: kernels fail assertions in them.
FAULTS = ("indices_out_of_range", "values_that_do_not_fit", "a_failure_does_not_spread")


def machine(suite: Suite) -> str:
    """Describe the machine."""
    code = (
        "import json, torch, sys\n"
        "found = {'torch': torch.__version__, 'python': sys.version.split()[0]}\n"
        "found['cuda'] = torch.version.cuda\n"
        "if torch.cuda.is_available():\n"
        "    p = torch.cuda.get_device_properties(0)\n"
        "    found['gpu'] = f'{p.name}, {p.total_memory >> 20} MiB, {p.major}.{p.minor}'\n"
        "    found['cudnn'] = torch.backends.cudnn.version()\n"
        "print(json.dumps(found))\n"
    )
    found = json.loads(suite.run(sys.executable, "-c", code).splitlines()[-1])
    if suite.gpu and "gpu" not in found:
        raise FailedError(f"torch {found['torch']} sees no GPU here: try --device cpu")
    cores = len(os.sched_getaffinity(0))
    facts = [f"{name} {value}" for name, value in found.items()]
    return ", ".join([*facts, f"{cores} cores", f"Linux {platform.release()}"])


def build(suite: Suite) -> str:
    """Compile the native part, and start compiling its tests."""
    missing = [name for name in ("blake3", "zstandard", "yaml", "pynvml") if not has_module(name)]
    suite.run(sys.executable, "-m", "kernelproxy.native")
    suite.compiling = threading.Thread(target=_compile_tests, args=(suite,))
    suite.compiling.start()
    return f"not installed here: {', '.join(missing)}" if missing else ""


def _compile_tests(suite: Suite) -> None:
    env = suite.environment()
    try:
        where = suite.complete(
            [sys.executable, "-m", "kernelproxy.native", "--torch-dir"], env, suite.deadline
        )
        command = [
            "make", "--no-print-directory", f"-j{len(os.sched_getaffinity(0))}", "-C", "native",
            "test", f"TORCH_DIR={where.stdout.strip()}", f"BUILD={suite.scratch / 'tests'}",
        ]  # fmt: skip
        suite.compiled.append(suite.complete(command, env, suite.deadline))
    except Exception as error:
        suite.compiled.append(error)


def cpp_tests(suite: Suite) -> str:
    """Wait for the tests of the native part, which compile during the earlier steps."""
    if suite.compiling is None:
        raise FailedError("nothing was built")
    suite.compiling.join(max(1.0, suite.limit - time.monotonic()))
    if suite.compiling.is_alive():
        raise TimeoutError("they did not compile in time")
    (done,) = suite.compiled
    if isinstance(done, Exception):
        raise done
    (suite.out / "cpp-tests.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        raise FailedError(tail_of(done.stdout + done.stderr))
    return tail_of(done.stdout, 1)


def surface(suite: Suite) -> str:
    """Check the parts of `torch.cuda` that programs expect."""
    with suite.daemon(suite.devices("2GiB")) as env:
        printed = suite.run(*suite.proxied("tests/programs/operators/surface.py"), env=env)
    found = _objects(printed)
    wrong = {each["name"]: tail_of(each["error"], 1) for each in found if each["error"]}
    return _judged(len(found), wrong)


def behaviours_software(suite: Suite) -> str:
    """Compare the results of programs on a software device with the CPU, bit for bit."""
    _need("numpy")
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with suite.daemon("cpu:2GiB@1", **one) as env:
        printed = suite.run(*suite.proxied("tests/programs/operators/behaviours.py"), env=env)
    found = _objects(printed)
    return _judged(len(found), {e["name"]: e["message"] for e in found if not e["ok"]})


def behaviours_gpu(suite: Suite) -> str:
    """Compare the results of programs on the proxied GPU with plain torch on the same GPU."""
    if not suite.gpu:
        raise SkippedError("there is no GPU to compare with")
    _need("numpy")
    files = {side: suite.scratch / f"{side}.pt" for side in ("plain", "proxied")}
    program = "tests/programs/operators/behaviours.py"
    arguments = ["--device", "cuda", "--leave-out", *FAULTS, "--save"]
    suite.run(
        sys.executable, "-m", "tests.programs.operators.behaviours", *arguments, files["plain"]
    )
    with suite.daemon(suite.devices()) as env:
        command = suite.proxied(program, *arguments, str(files["proxied"]))
        suite.run(*command, env=env, label="proxied")
    command = (
        sys.executable,
        "-m",
        "tests.programs.operators.behaviours",
        "--compare",
        *files.values(),
    )
    found = _objects(suite.run(*command, label="comparison"))
    return _judged(len(found), {e["name"]: e["message"] for e in found if not e["ok"]})


def faults(suite: Suite) -> str:
    """Check that a kernel that fails an assertion ends its operator, and not the session."""
    with suite.daemon(suite.devices()) as env:
        printed = suite.run(*suite.proxied("tests/programs/operators/faults.py"), env=env)
    found = _objects(printed)
    return _judged(len(found), {e["name"]: e["error"] for e in found if e["error"]})


def training_software(suite: Suite) -> str:
    """Train on a software device and on the CPU: equal bit for bit."""
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with suite.daemon("cpu:2GiB@1", **one) as env:
        return _training(suite, env, "cpu", 0.0)


def training_gpu(suite: Suite) -> str:
    """Train on the proxied GPU and on the plain one."""
    if not suite.gpu:
        raise SkippedError("there is no GPU to compare with")
    with suite.daemon(suite.devices()) as env:
        return _training(suite, env, "cuda", 1e-4)


def _training(suite: Suite, env: dict[str, str], plain: str, relative: float) -> str:
    names = [*PROGRAMS, *([n for n in TRANSFORMERS if " " not in n] if suite.transformers else [])]
    options = ["--steps", "8", *names]
    program = "tests/programs/training/training.py"
    proxied = suite.run(
        *suite.proxied(program, "--device", "cuda", *options), env=env, label="proxied"
    )
    module = (sys.executable, "-m", "tests.programs.training.training", "--device", plain)
    first = {e["name"]: e for e in _objects(suite.run(*module, *options, env=env, label="plain"))}
    second = {e["name"]: e for e in _objects(proxied)}
    wrong, equal = {}, 0
    for name in names:
        if name not in first or name not in second:
            wrong[name] = "did not run"
            continue
        pairs = [[float.fromhex(loss) for loss in each[name]["losses"]] for each in (first, second)]
        same = pairs[0] == pairs[1]
        equal += same
        most = max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(*pairs, strict=True))
        if not most <= relative:
            wrong[name] = f"losses differ by {most:.1e}"
        elif first[name].get("tokens") != second[name].get("tokens"):
            wrong[name] = "tokens differ"
    return f"{equal} of {len(names)} bit for bit; {_judged(len(names), wrong)}"


def conformance(suite: Suite) -> str:
    """Run some of PyTorch's own operator samples on a software device."""
    if not (ROOT / "tests" / "conformance" / "program.py").is_file():
        raise SkippedError("there is no tests/conformance")
    _need("expecttest", "numpy")
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    program = suite.scratch / "conformance.py"
    program.write_text("from tests.conformance.program import main\nmain()\n", encoding="utf-8")
    arguments = ["--shards", "16", "--samples", "3", "--dtypes", "float32", "int64"]
    with suite.daemon("cpu:2GiB@1", **one) as env:
        found = [
            each
            for each in _objects(suite.run(*suite.proxied(program, *arguments), env=env))
            if "passed" in each
        ]
    counts = {k: sum(each[k] for each in found) for k in ("passed", "refused", "failed")}
    wrong = {e["name"]: str(e["failures"][:1]) for e in found if e["failed"]}
    return f"samples: {counts}; {_judged(len(found), wrong)}"


def programs(suite: Suite) -> tuple[str, list[str], Any]:
    """Compare programs on the proxied device with the same programs on plain torch."""
    names = [*PROGRAMS, *(TRANSFORMERS if suite.transformers else ())]
    rounds, round_seconds = (3, 0.05) if suite.small else (9, 0.4)
    rows: list[dict[str, Any]] = []
    wrong: dict[str, str] = {}
    opened: list[str] = []
    with suite.daemon(suite.devices()) as env:
        for name in names:
            if time.monotonic() > suite.limit - 5:
                wrong[name] = "no time was left"
                continue
            try:
                # Each program has processes of its own, so a failure does not affect others.
                with (
                    suite.side(env, proxied=False) as plain,
                    suite.side(env, proxied=True) as other,
                ):
                    rows.append(_pair(name, plain, other, rounds, round_seconds))
                    opened += other.order("driver")["open"]
            except FailedError as error:
                wrong[name] = str(error)
    if opened:
        wrong["driver"] = f"the program has the GPU open: {', '.join(opened)}"
    table = [
        "| program | plain, ms/step | proxied, ms/step | ratio | quartiles | issued by Python in, "
        "plain | proxied | operators | records | KB | requests | client, µs/operator |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    table += [
        f"| {row['program']} | {row['plain']:.2f} | {row['proxied']:.2f} | **{row['ratio']:.2f}** "
        f"| {row['low']:.2f} to {row['high']:.2f} | {row['plain_issued']:.2f} "
        f"| {row['issued']:.2f} | {row['operators']:.0f} | {row['records']:.0f} "
        f"| {row['bytes'] / 1e3:.0f} | {row['requests']:.1f} "
        f"| {row['issued'] * 1e3 / max(row['operators'], 1):.1f} |"
        for row in rows
    ]
    ratios = [row["ratio"] for row in rows]
    text = f"median ratio {statistics.median(ratios):.2f}, " if ratios else ""
    text += f"worst {max(ratios):.2f}; " if ratios else ""
    try:
        return text + _judged(len(names), wrong), table, rows
    except FailedError as error:
        raise FailedError(text + str(error), table, rows) from None


def _pair(
    name: str, plain: GpuProcessSide, proxied: GpuProcessSide, rounds: int, round_seconds: float
) -> dict[str, Any]:
    """Run a program on both sides in turns; the side that begins alternates."""
    both = (plain, proxied)
    for side in both:
        side.order("train", program=name, steps=3)  # models are made, caches filled
    once = max(side.order("train", program=name, steps=3)["seconds"] / 3 for side in both)
    steps = max(3, round(round_seconds / once))
    times: dict[GpuProcessSide, list[float]] = {plain: [], proxied: []}
    for index in range(rounds):
        for side in both if index % 2 else reversed(both):
            seconds = side.order("train", program=name, steps=steps)["seconds"]
            times[side].append(seconds / steps * 1e3)
    ratios = sorted(b / a for a, b in zip(times[plain], times[proxied], strict=True))
    # Measure the time in which Python issues a few steps, which fit into the log.
    issues = {side: side.order("measure", program=name, steps=3) for side in both}
    sent = issues[proxied]
    return {
        "program": name,
        "plain": statistics.median(times[plain]),
        "proxied": statistics.median(times[proxied]),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[-1 - len(ratios) // 4],
        "plain_issued": issues[plain]["issued"] / 3 * 1e3,
        "issued": sent["issued"] / 3 * 1e3,
        **{key: sent[key] / 3 for key in ("operators", "records", "bytes", "requests")},
    }


def moves(suite: Suite) -> tuple[str, list[str], Any]:
    """Suspend and resume a state; compare with the rates of copies of the same bytes."""
    bytes_held = (64 << 20) if suite.small else (4 << 30)
    times = 2 if suite.small else 3
    with suite.side(suite.environment(), proxied=False) as plain:
        rates = plain.order("copies", bytes=min(bytes_held, 1 << 30))
    rows: dict[str, list[float]] = {"suspend": [], "first": [], "loaded": []}
    limit = "" if suite.gpu else "8GiB"
    with suite.daemon(suite.devices(limit)) as env, suite.side(env, proxied=True) as proxied:
        expected = proxied.order("hold", bytes=bytes_held)["sum"]
        proxied.order("touch")
        with agent_client.connect(start=False) as agent:
            (session,) = agent.expect(StatusReply, StatusRequest()).sessions
        for _ in range(times):
            proxied.order("rewrite")
            begin = time.perf_counter()
            _verb(Suspend(session["id"], "gpu suite"), suite)
            rows["suspend"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            _verb(Resume(session["id"]), suite)
            proxied.order("touch")
            rows["first"].append(time.perf_counter() - begin)
            proxied.order("reach")
            rows["loaded"].append(time.perf_counter() - begin)
            if proxied.order("check")["sum"] != expected:
                raise FailedError("a session that was resumed does not hold what it held")
    middle = {name: statistics.median(seconds) for name, seconds in rows.items()}
    table = [
        "| what | seconds | GB/s |",
        "|---|---|---|",
        f"| suspend {bytes_held >> 20} MiB, all changed | {middle['suspend']:.2f} "
        f"| {bytes_held / middle['suspend'] / 1e9:.1f} |",
        f"| resume until the first operator's answer | {middle['first']:.2f} | |",
        f"| resume until all is there | {middle['loaded']:.2f} "
        f"| {bytes_held / middle['loaded'] / 1e9:.1f} |",
        *(f"| copy, {name} | | {rate:.1f} |" for name, rate in rates.items()),
    ]
    text = f"suspend at {bytes_held / middle['suspend'] / 1e9:.1f} GB/s"
    return text, table, {"rates": rates, **rows}


def _verb(request: Any, suite: Suite) -> None:
    with agent_client.connect(start=False) as agent:
        agent.expect(SessionReply, request, max(1.0, suite.limit - time.monotonic()))


#: Steps, with the time limit of each in seconds.
STEPS: tuple[tuple[str, float, Callable[[Suite], Any]], ...] = (
    ("machine", 60, machine),
    ("build", 180, build),
    ("surface", 60, surface),
    ("behaviours, software device", 60, behaviours_software),
    ("behaviours, GPU", 90, behaviours_gpu),
    ("training, software device", 90, training_software),
    ("training, GPU", 90, training_gpu),
    ("faults", 60, faults),
    ("C++ tests", 120, cpp_tests),
    ("programs", 200, programs),
    ("moves", 60, moves),
    ("conformance", 60, conformance),
)


def _need(*packages: str) -> None:
    for package in packages:
        if not has_module(package):
            raise SkippedError(f"the package {package} is missing")


def _judged(count: int, wrong: dict[str, str]) -> str:
    if not count:
        raise FailedError("nothing was tried")
    if wrong:
        first = "; ".join(f"{name}: {tail_of(text, 1)}" for name, text in list(wrong.items())[:8])
        raise FailedError(f"{len(wrong)} of {count} are wrong: {first}")
    return f"{count} of {count}"


def _objects(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
