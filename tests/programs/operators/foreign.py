"""Use operators of a compiled library and of a Python module, step by step.

``foreign.py DIRECTORY`` names where they lie: the library ``libforeign.so``, the module
``foreign_operators``. A line of standard input orders a step, a line of output answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType

import torch

#: Device tensors of earlier steps.
kept: list[torch.Tensor] = []


def step(order: str, directory: Path) -> object:
    x = torch.arange(6.0).reshape(2, 3)
    if order == "compiled":
        torch.ops.load_library(str(directory / "libforeign.so"))
        return check(torch.ops.foreign.twice_plus, x, 3)
    if order.startswith("both"):
        return both(order, directory, x)
    if order == "late":
        return late(directory, x)
    if order == "gradient":
        return check(twice_with_gradient, x)
    if order == "dynamic":  # as many results as there are positive ones
        return [check(torch.ops.foreign.positive, x - n) for n in (2, 4)]
    if order == "optional":  # with a second result, and with None
        return [optional(x, bound) for bound in (2.0, 9.0)]
    if order == "own":
        return own(directory, x)
    if order.startswith(("before ", "after ")):
        return check(getattr(torch.nn.functional, order.split()[1], torch.erfinv), x / 8)
    if order == "replacing":
        ctypes.CDLL(str(directory / "libforeign_late.so"))
        return check(torch.add, x, x)
    if order == "in place":
        return check(lambda y: torch.ops.foreign.fill_(y, 2.5), x)
    if order == "python":
        importlib.import_module("foreign_operators")
        return check(torch.ops.foreign_operators.thrice, x)
    if order == "backends":
        operators = getattr(torch.ops, importlib.import_module("foreign_backends").__name__)
        leaf = x.cuda().requires_grad_()
        operators.cube(leaf).sum().backward()
        checks = [check(op, x) for op in (operators.twice, operators.twice_, operators.third)]
        assert leaf.grad is not None
        return [*checks, check(operators.cube, x) and torch.equal(leaf.grad.cpu(), 3 * x**2)]
    if order == "erratic":
        importlib.import_module("foreign_erratic")
        kept.append(torch.ops.foreign_erratic.rows(x.cuda()) + 1)
        return list(kept[-1].shape)
    if order == "erratic, kept":
        return kept[-1].tolist()
    if order == "composed":
        importlib.import_module("foreign_composed")
        return torch.equal(torch.ops.foreign_composed.twice(x.cuda()).cpu(), 2 * x)
    if order == "missing":
        importlib.import_module("foreign_missing")
        (directory / "foreign_missing.py").unlink()
        return check(torch.ops.foreign_missing.once, x)
    if order == "notebook":
        torch.library.define("foreign_notebook::once", "(Tensor x) -> Tensor")
        torch.library.impl("foreign_notebook::once", "CPU", lambda x: x + 1)
        return check(torch.ops.foreign_notebook.once, x)
    if order == "products":
        pair = torch.ones(2, 3, 1), torch.ones(2, 1, 4)
        return [check(operator, *pair) for operator in (torch.matmul, torch.bmm)]
    if order == "triton":
        return importlib.import_module("triton.runtime.driver")._create_driver()
    if order == "cupy":
        importlib.util.find_spec("cupy")  # finding it does not import it
        with contextlib.redirect_stderr(io.StringIO()) as said:
            importlib.import_module("cupy")
        return said.getvalue().strip()
    if order == "custom":
        return check(custom(), x), differentiated(x)
    raise ValueError(order)


def check(operator: Callable[..., torch.Tensor], x: torch.Tensor, *more: object) -> bool:
    """True if an operator has the same result on the device as on the CPU."""
    moved = [value.cuda() if isinstance(value, torch.Tensor) else value for value in more]
    proxied = operator(x.cuda(), *moved)
    torch.cuda.synchronize()
    return proxied.is_cuda and torch.equal(proxied.cpu(), operator(x.clone(), *more))


def optional(x: torch.Tensor, bound: float) -> bool:
    """True if an operator that may return None has the same result on the device as on the CPU."""
    plain, proxied = (torch.ops.foreign.beyond(each, bound) for each in (x, x.cuda()))
    if plain[1] is None or proxied[1] is None:
        return plain[1] is None and proxied[1] is None
    return all(torch.equal(one, other.cpu()) for one, other in zip(plain, proxied, strict=True))


def own(directory: Path, x: torch.Tensor) -> tuple[object, ...]:
    """Use a library that launches kernels itself; return what is right, and what is refused."""
    torch.ops.load_library(str(directory / "libforeign_both.so"))
    operators = torch.ops.foreign_own
    y = x.cuda()
    y[1:].mul_(1.0).add_(y[:1]).sub_(y[:1])  # read by torch's shape functions
    whole = [
        torch.equal(operator(y).cpu(), 2 * x)
        for operator in (
            operators.twice,
            operators.explicit,
            operators.differentiable,
            torch.ops.foreign_old.twice,
        )
    ]
    with torch.no_grad():
        whole.append(torch.equal(operators.twice(y.clone().requires_grad_()).cpu(), 2 * x))
    with torch.inference_mode():
        whole.append(torch.equal(operators.twice(x.cuda()).cpu(), 2 * x))
    whole.append(operators.resized(y.clone()).tolist()[0] == 1)
    stopped = 0
    for operator in (
        operators.twice,
        operators.differentiable,
        operators.explicit,
        torch.autocast("cuda")(operators.twice),
        torch.autocast("cuda")(operators.resized),
    ):
        needs_no_gradient = isinstance(operator, FunctionType)
        try:
            operator(y.clone() if needs_no_gradient else y.clone().requires_grad_())
        except RuntimeError as error:
            stopped += str(error).startswith(
                "This code reads or writes the memory of a CUDA tensor"
            )
    storage = y.untyped_storage()
    addressed = (
        y[1:].data_ptr() == storage.data_ptr() + 12 and torch.empty(0).cuda().data_ptr() == 0
    )
    composed = check(operators.composed, x)
    plain = all(torch.equal(op(x), 2 * x) for op in (operators.twice, operators.differentiable))
    return addressed, composed, plain, y.clone().data_ptr() != y.data_ptr(), all(whole), stopped


def both(order: str, directory: Path, x: torch.Tensor) -> bool:
    """Use a library that has kernels for the CPU and for CUDA."""
    path = str(directory / "libforeign_both.so")
    if order == "both in a thread":  # while the main thread waits
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(both, "both", directory, x).result()
    torch.ops.load_library(path)
    operators = torch.ops.foreign_both
    if order == "both, differentiated":
        leaf = x.cuda().requires_grad_()
        operators.twice(leaf).square().sum().backward()
        assert leaf.grad is not None
        return torch.equal(leaf.grad.cpu(), 8 * x)
    if order == "both, on the CPU":
        return torch.equal(operators.twice(x), 2 * x) and operators.counted(x)[1] == x.numel()
    out = torch.empty_like(x).cuda()
    operators.twice.out(x.cuda(), out=out)
    result, count = operators.counted(x.cuda())
    return (
        check(operators.twice, x)
        and check(operators.twice_, x)
        and torch.equal(out.cpu(), 2 * x)
        and torch.equal(result.cpu(), 2 * x)
        and count == x.numel()
    )


def late(directory: Path, x: torch.Tensor) -> bool:
    """Use an operator before and after another library has registered a kernel for CUDA."""
    torch.ops.load_library(str(directory / "libforeign_both.so"))
    before = check(torch.ops.foreign_both.late, x)
    torch.ops.load_library(str(directory / "libforeign_late.so"))
    return before and check(torch.ops.foreign_both.late, x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.foreign.twice_plus(x, 0)

    @staticmethod
    def backward(ctx: object, outer: torch.Tensor) -> torch.Tensor:
        return torch.ops.foreign.twice_plus(outer, 0)


def twice_with_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    Twice.apply(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


_own: list[Callable[..., torch.Tensor]] = []


def custom() -> Callable[..., torch.Tensor]:
    """Define a notebook's own operator, made of torch's operators."""
    if not _own:

        @torch.library.custom_op("foreign_custom::shifted", mutates_args=())
        def shifted(x: torch.Tensor, by: float = 1.5) -> torch.Tensor:
            return x.sin() + by

        shifted.register_fake(lambda x, by=1.5: torch.empty_like(x))
        shifted.register_autograd(
            lambda ctx, outer: (outer * ctx.saved_tensors[0].cos(), None),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        )
        _own.append(shifted)
    return _own[0]


def differentiated(x: torch.Tensor) -> bool:
    def gradient(device: str) -> torch.Tensor:
        leaf = x.to(device).requires_grad_()
        custom()(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad.cpu()

    return torch.equal(gradient("cuda"), gradient("cpu"))


def main() -> None:
    directory = Path(sys.argv[1])
    sys.path.append(str(directory))
    assert torch.zeros(1, device="cuda").is_cuda
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            print(step(line.strip(), directory), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
