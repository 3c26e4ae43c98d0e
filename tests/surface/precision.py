"""Mixed precision."""

from __future__ import annotations

import torch

from tests.surface.checking import check, refused


@check
def mixed_precision() -> None:
    w = torch.ones(4, 4, device="cuda", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([w], 0.1), torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = w @ w
    assert product.dtype == torch.bfloat16
    scaler.scale(product.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert w.detach().max().item() < 1


@check
def autocast_chooses_dtypes_as_on_cuda() -> None:
    a, b = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda", dtype=torch.half)
    with torch.autocast("cuda"):
        assert (a @ a).dtype == torch.half  # CUDA's default
        assert torch.nn.functional.linear(a, a).dtype == torch.half
        for function in (torch.exp, torch.log, torch.sum, torch.norm):
            assert function(b).dtype == torch.float32
        assert torch.nn.functional.layer_norm(b, (4,)).dtype == torch.float32
        assert torch.cat([a, b]).dtype == torch.float32
        assert torch.relu(b).dtype == torch.half
        with torch.autocast("cuda", enabled=False):
            assert (a @ a).dtype == torch.float32
        text = refused(lambda: torch.nn.functional.binary_cross_entropy(a.sigmoid(), a))
        assert "unsafe to autocast" in text
    assert torch.get_autocast_dtype("cuda") == torch.half
    assert torch.amp.is_autocast_available("cuda")
    assert not torch.is_autocast_enabled("cuda")


@check
def the_scaler_skips_steps_with_infinite_gradients() -> None:
    w = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([w], 1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=1)
    for factor, value, scale in ((float("inf"), 1.0, 4.0), (1.0, 0.0, 8.0)):
        optimizer.zero_grad()
        scaler.scale((w * factor).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([w], 1e9, error_if_nonfinite=False)
        scaler.step(optimizer)
        scaler.update()
        assert w.tolist() == [value] * 3
        assert scaler.get_scale() == scale
    restored = torch.amp.GradScaler("cuda")
    restored.load_state_dict(scaler.state_dict())
    assert restored.get_scale() == 8.0


@check
def functions_are_told_of_autocast() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled("cuda")
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(2, device="cuda", dtype=torch.half, requires_grad=True)
    with torch.autocast("cuda"):
        y = Double.apply(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
