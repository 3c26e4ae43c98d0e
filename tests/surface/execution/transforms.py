"""Programs that torch derives from programs: scripts, traces, exports, transforms, checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from tests.surface.checking import check


def network() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(6, 2)
    ).cuda()


@check
def modules_are_scripted_and_traced() -> None:
    model = network().eval()
    x = torch.randn(3, 4, device="cuda")
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for made in (torch.jit.trace(model, (x,)), torch.jit.script(model)):
            assert torch.equal(made(x), expected)
            assert torch.equal(torch.jit.freeze(made)(x), expected)
            file = io.BytesIO()
            torch.jit.save(made, file)
            for place in ("cuda", "cpu", None):
                file.seek(0)
                loaded = torch.jit.load(file, map_location=place)
                where = "cpu" if place == "cpu" else "cuda"
                assert {p.device.type for p in loaded.parameters()} == {where}
                torch.testing.assert_close(loaded(x.to(where)).cpu(), expected.cpu())


@check
def scripts_have_control_flow_and_gradients() -> None:
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        result = torch.ones_like(x)
        for _ in range(n):
            if bool(result.sum() < 1000.0):
                result = result * x
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(power)
    x = torch.full((3,), 2.0, device="cuda", requires_grad=True)
    for _ in range(4):  # profiled, then optimised
        (grad,) = torch.autograd.grad(scripted(x, 3).sum(), x)
        assert grad.tolist() == [12.0] * 3


@check
def functions_are_transformed() -> None:
    x = torch.randn(5, 3, device="cuda", dtype=torch.float64)
    w = torch.randn(3, device="cuda", dtype=torch.float64)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x * w).sin().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    torch.testing.assert_close(per_sample, (x * w).cos() * x)
    hessian = torch.func.hessian(partial(loss, x=x))(w)
    torch.testing.assert_close(hessian, torch.diag(-(x.square() * (x * w).sin()).sum(0)))
    # torch says that both return three values, as with has_aux.
    value, tangent = torch.func.jvp(  # type: ignore[misc]
        partial(loss, x=x), (w,), (torch.ones_like(w),)
    )
    torch.testing.assert_close(tangent, ((x * w).cos() * x).sum())
    _, pull = torch.func.vjp(partial(loss, x=x), w)  # type: ignore[misc]
    torch.testing.assert_close(pull(torch.ones_like(value))[0], per_sample.sum(0))
    jacobian = torch.func.jacrev(lambda w: (x * w).sin())(w)
    torch.testing.assert_close(jacobian, torch.func.jacfwd(lambda w: (x * w).sin())(w))
    model = network().eval()
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    inputs = torch.ones(2, 4, device="cuda")
    assert torch.func.functional_call(model, zeros, (inputs,)).abs().max().item() == 0
    models = [network().eval() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    found = torch.func.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (inputs,)))(
        parameters, buffers
    )
    torch.testing.assert_close(found, torch.stack([m(inputs) for m in models]))


@check
def checkpointed_segments_draw_the_same_numbers_again() -> None:
    model = network()
    x = torch.randn(8, 4, device="cuda", requires_grad=True)
    torch.manual_seed(5)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    after = torch.cuda.get_rng_state()
    for reentrant in (True, False):
        torch.manual_seed(5)
        result = checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=True)
        y = result.square().sum()
        torch.rand(3, device="cuda")
        if reentrant:
            x.grad = None
            y.backward()
            assert x.grad is not None
            found = x.grad
        else:
            (found,) = torch.autograd.grad(y, x)
        assert torch.equal(found, expected)
        torch.manual_seed(5)
        model(x)
        assert torch.equal(torch.cuda.get_rng_state(), after)


@check
def programs_are_exported() -> None:
    model = network().eval()
    x = torch.randn(3, 4, device="cuda")
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(x), model(x))


@check
def objects_with_device_tensors_are_copied_and_pickled() -> None:
    model = network()
    tensor = torch.arange(6.0, device="cuda").reshape(2, 3).t().requires_grad_()
    for copied in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert copied.is_cuda
        assert copied.requires_grad
        assert copied.stride() == tensor.stride()
        assert torch.equal(copied, tensor)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    optimizer.step()
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    optimizer.load_state_dict(state)
    both = pickle.loads(pickle.dumps(model))
    for ours, theirs in zip(both.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
