"""Tries one sample of an operator on the CPU and on the proxied device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo, SampleInput

from tests.conformance.comparing import aliasing, differences
from tests.conformance.moving import Mover, tensors_in

DEVICES = ("cpu", "cuda")
#: Operators that return uninitialized memory.
UNINITIALISED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}
UNINITIALISED |= {"empty_permuted", "resize_", "resize_as_"}
WHERE = re.compile(r" \[[\w:.]+, position \d+ of the device log\]")
REFUSED = re.compile(r"proxied device|torch has no kernel of this operator")
#: Errors that depend on the values; a GPU, too, reports them later.
OF_DATA = re.compile(r"out of (bounds|range)|singular|did not converge|not positive")
#: Operands that have to stay on the host, on CUDA devices as well.
ON_HOST = {"tensor_split"}
#: Differences that are caused by the CPU, and do not count as failures of an operator. The CPU
#: takes norms in double precision for `renorm`'s gradient, which CUDA does not, and finds no
#: element that is as large as the largest; `linalg_lu_solve` marks its result as conjugate instead
#: of conjugating it.
OF_CPUS = {
    "renorm": re.compile(r"gradients\[0\]: values: .* nan at index"),
    "linalg_lu_solve": re.compile(r"is_conj True became False"),
}
#: Limits of the kernels of GPUs, which those of a software device do not have.
OF_GPUS = re.compile("CUDA Tensors cannot have more than 25 dimensions")


@dataclass
class CallOutcome:
    """Result of one way of calling an operator on one device."""

    results: Any = None
    operands: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    error: Exception | None = None
    late: bool = False  # the error came at the next synchronization
    device: str = "cpu"  # required device of the results


class Refused(Exception):  # noqa: N818 - no error of ours
    """The proxied device does not support this call."""


def attempts(
    op: OpInfo, sample: SampleInput, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[str], CallOutcome]]]:
    """Name the ways of calling an operator with a sample; each is a function of a device."""
    differentiated = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    yield "forward", lambda device: _forward(op, sample, device, differentiated)
    if op.supports_out:
        for case in ("exact", "empty", "strided"):
            yield f"out ({case})", partial(_out, op, sample, case=case)
    inplace = op.get_inplace()
    if inplace is not None and not sample.broadcasts_input:
        yield "in place", lambda device: _in_place(op, inplace, sample, device)


def wrong_samples(op: OpInfo) -> Iterator[Callable[[], list[str]]]:
    """Try the samples that PyTorch expects a CUDA device to raise an error for.

    Each returned function tries one; it raises `Refused` or lists what is wrong.
    """
    if op.error_inputs_func is None:
        return
    for expected in op.error_inputs("cuda"):
        sample = expected.sample_input
        place = CallOutcome()
        _place(place, "cuda", [sample.input, sample.args, sample.kwargs])
        if place.device != "cuda" or OF_GPUS.search(expected.error_regex):
            continue

        def attempt(sample: SampleInput = sample, expected: Any = expected) -> list[str]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = _outcome(
                    "cuda", lambda _: op(sample.input, *sample.args, **sample.kwargs)
                )
            if outcome.error is None and _takes_wrong_samples(op):
                return []
            return list(_of_expected_error(outcome, expected.error_type, expected.error_regex))

        yield attempt


def _takes_wrong_samples(op: OpInfo) -> bool:
    """True if PyTorch's own test of errors on CUDA expects this operator not to raise one."""
    return any(
        isinstance(each, DecorateInfo)
        and (each.cls_name, each.test_name) == ("TestCommon", "test_errors")
        and each.device_type in (None, "cuda")
        for each in op.decorators
    )


def compare(op: OpInfo, way: str, attempt: Callable[[str], CallOutcome]) -> list[str]:
    """Try one way on both devices and list what differs.

    Raises
    ------
    Refused
        If the proxied device refuses what the CPU does; it has the message.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, proxied = (attempt(device) for device in DEVICES)
    if plain.error is not None or proxied.error is not None:
        return list(_of_errors(plain, proxied, way))
    found: list[str] = []
    values = op.name not in UNINITIALISED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("results", "outputs", "operands", "gradients"):
            one, other = getattr(plain, name), getattr(proxied, name)
            found += differences(one, other, f"{way}: {name}", values=values, device=proxied.device)
        aliases = [
            aliasing(tensors_in(each.results), each.operands + each.outputs)
            for each in (plain, proxied)
        ]
        if aliases[0] != aliases[1]:
            found.append(f"{way}: aliases {aliases[0]} became {aliases[1]}")
    known = OF_CPUS.get(op.name)
    return [text for text in found if known is None or not known.search(text)]


def _of_expected_error(outcome: CallOutcome, error_type: Any, regex: str) -> Iterator[str]:
    if outcome.error is None:
        yield f"did not raise {error_type}: {regex}"
        return
    text = str(outcome.error)
    if not isinstance(outcome.error, error_type):
        if REFUSED.search(text):
            raise Refused(first_line(outcome.error))
        yield f"{error_type} became {type(outcome.error).__name__}: {first_line(outcome.error)}"
    elif not re.search(regex, text):
        yield f"message {regex!r} became {first_line(outcome.error)!r}"
    elif outcome.late and not OF_DATA.search(text):
        yield f"error came late: {first_line(outcome.error)}"


def _of_errors(plain: CallOutcome, proxied: CallOutcome, way: str) -> Iterator[str]:
    if proxied.error is not None:
        text = first_line(proxied.error)
        if REFUSED.search(text):
            raise Refused(text)
    if plain.error is None:
        yield f"{way}: raised {type(proxied.error).__name__}: {first_line(proxied.error)}"
    elif proxied.error is None:
        yield f"{way}: did not raise {type(plain.error).__name__}: {first_line(plain.error)}"
    elif type(plain.error) is not type(proxied.error):
        yield (
            f"{way}: {type(plain.error).__name__} ({first_line(plain.error)}) became "
            f"{type(proxied.error).__name__} ({first_line(proxied.error)})"
        )
    elif proxied.late and not OF_DATA.search(str(proxied.error)):
        yield f"{way}: error came late: {first_line(proxied.error)}"


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error, without its position in the log."""
    return (WHERE.sub("", str(error)).strip().splitlines() or [""])[0][:200]


def _place(outcome: CallOutcome, device: str, sample: Any) -> None:
    """Record the operands of a call, and the required device of its results."""
    outcome.operands = tensors_in(sample)
    named = [value for value in _leaves(sample) if str(value).startswith(device)]
    on = [tensor for tensor in outcome.operands if tensor.device.type == device]
    outcome.device = device if named or on else "cpu"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, (str, torch.device)):
        yield value


def _outcome(device: str, call: Callable[[CallOutcome], None]) -> CallOutcome:
    outcome = CallOutcome()
    torch.manual_seed(0)
    try:
        call(outcome)
    except Exception as error:
        outcome.error = error
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as error:
            if outcome.error is None:
                outcome.error, outcome.late = error, True
    return outcome


def _moved(op: OpInfo, sample: SampleInput, device: str) -> tuple[Any, Any, Any]:
    mover = Mover(device)
    if op.name in ON_HOST:
        host = Mover("cpu")
        return mover.value(sample.input), host.value(sample.args), host.value(sample.kwargs)
    return mover.sample(sample)


def _forward(op: OpInfo, sample: SampleInput, device: str, differentiated: bool) -> CallOutcome:
    def call(outcome: CallOutcome) -> None:
        first, args, kwargs = _moved(op, sample, device)
        _place(outcome, device, [first] if op.name in ON_HOST else [first, args, kwargs])
        outcome.results = op(first, *args, **kwargs)
        if differentiated:
            outcome.gradients = _gradients(sample, outcome)

    return _outcome(device, call)


def _gradients(sample: SampleInput, outcome: CallOutcome) -> list[torch.Tensor | None]:
    leaves = [each for each in outcome.operands if each.requires_grad and each.is_leaf]
    results = [
        each
        for each in tensors_in(sample.output_process_fn_grad(outcome.results))
        if each.requires_grad
    ]
    if not leaves or not results:
        return []
    torch.manual_seed(1)
    weights = [
        torch.randn(each.shape, dtype=each.dtype).to(each.device)
        if each.layout is torch.strided
        else torch.ones_like(each)
        for each in results
    ]
    return list(torch.autograd.grad(results, leaves, weights, allow_unused=True))


def _out(op: OpInfo, sample: SampleInput, device: str, *, case: str) -> CallOutcome:
    def call(outcome: CallOutcome) -> None:
        first, args, kwargs = _moved(op, sample, device)
        _place(outcome, device, [first] if op.name in ON_HOST else [first, args, kwargs])
        with torch.no_grad():
            expected = op(*_plain(sample)[0], **_plain(sample)[1])
            single = isinstance(expected, torch.Tensor)
            outs = [_output(each, case, device) for each in ([expected] if single else expected)]
            outcome.outputs, outcome.device = outs, device
            torch.manual_seed(0)
            outcome.results = op(
                *_detached((first, *args)),
                **_detached(kwargs),
                out=outs[0]
                if single
                else type(expected)(outs)
                if type(expected) in (tuple, list)
                else tuple(outs),
            )

    return _outcome(device, call)


def _plain(sample: SampleInput) -> tuple[tuple[Any, ...], dict[str, Any]]:
    first, args, kwargs = Mover("cpu").sample(sample)
    return (first, *args), kwargs


def _output(like: torch.Tensor, case: str, device: str) -> torch.Tensor:
    if case == "empty":
        return torch.empty(0, dtype=like.dtype, device=device)
    if case == "exact":
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    wide = torch.zeros((*like.shape, 2), dtype=like.dtype, device=device)
    return wide.select(-1, 0)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_detached(item) for item in value)
    return value


def _in_place(
    op: OpInfo, function: Callable[..., Any], sample: SampleInput, device: str
) -> CallOutcome:
    def call(outcome: CallOutcome) -> None:
        first, args, kwargs = _moved(op, sample, device)
        first, args, kwargs = _detached(first), _detached(args), _detached(kwargs)
        _place(outcome, device, [first] if op.name in ON_HOST else [first, args, kwargs])
        with torch.no_grad():
            outcome.results = function(first, *args, **kwargs)

    return _outcome(device, call)
