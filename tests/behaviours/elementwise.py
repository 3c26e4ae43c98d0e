"""Element-wise operators: arithmetic, types, comparisons."""

from __future__ import annotations

import torch

from tests.behaviours.comparison import behaviour, normal, whole

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@behaviour
def arithmetic(device: str) -> object:
    x, y = normal(device, 5, 7), normal(device, 7)
    return x + y, x - 2, 3 / x, x * y, x // 0.3, x % 0.3, x**2, 2**x, -x, abs(x), 1 - x


@behaviour
def arithmetic_in_place(device: str) -> object:
    x, y = normal(device, 5, 7), normal(device, 7)
    x += y
    x *= 2
    x -= 1
    x /= y
    x **= 2
    x.addcmul_(x, y, value=0.5).addcdiv_(y, x + 1, value=-0.1).clamp_(-3, 3).neg_()
    return x


@behaviour
def functions(device: str) -> object:
    x = normal(device, 5, 7)
    names = "exp sin cos tan tanh sigmoid erf expm1 sign floor ceil round trunc frac square sinh"
    names += " atan asinh sinc erfinv lgamma digamma logit deg2rad isfinite signbit reciprocal"
    positive = "log log2 log10 log1p sqrt rsqrt"
    return {
        **{name: getattr(torch, name)(x) for name in names.split()},
        **{name: getattr(torch, name)(x.abs()) for name in positive.split()},
    }


@behaviour
def functions_of_two(device: str) -> object:
    x, y = normal(device, 5, 7), normal(device, 5, 7)
    names = "atan2 hypot fmod remainder maximum minimum fmax fmin copysign logaddexp nextafter"
    return {name: getattr(torch, name)(x, y) for name in names.split()}


@behaviour
def special_functions(device: str) -> object:
    x = normal(device, 20).abs() + 0.1
    names = "entr erfcx i0 i0e i1 ndtr ndtri log_ndtr psi gammaln bessel_j0 expit xlog1py"
    return {
        name: getattr(torch.special, name)(*([x, x] if name == "xlog1py" else [x]))
        for name in names.split()
    }


@behaviour
def choosing(device: str) -> object:
    x = normal(device, 5, 7)
    return (
        torch.where(x > 0, x, 0.0),
        torch.where(x > 0, x, x.double()),
        x.clamp(-0.5, 0.5),
        x.clamp_min(0),
        x.clamp(max=normal(device, 7)),
        torch.lerp(x, x * 2, 0.3),
        torch.heaviside(x, normal(device, 7)),
        x.masked_fill(x > 1, float("-inf")),
        torch.nan_to_num(x.log()),
    )


@behaviour
def comparisons(device: str) -> object:
    x = normal(device, 5, 7)
    return (
        [x > 0, x <= 0.5, x == x, x != 0, (x > 0) & (x < 1), (x > 0) | (x < -1), ~(x > 0)],
        [torch.logical_and(x > 0, x < 1), torch.logical_xor(x, x > 0), torch.logical_not(x)],
        [x.isnan(), x.isinf(), torch.isin(x, x[:1]), torch.isclose(x, x + 1e-9)],
        [torch.equal(x, x.clone()), torch.allclose(x, x + 1e-9), bool((x > 9).any())],
    )


@behaviour
def whole_numbers(device: str) -> object:
    x = whole(device, 5, 7, below=100)
    return (
        [x // 3, x % 7, x / 3, x << 1, x >> 1, x & 6, x | 1, x ^ 5, -x, ~x, x**2],
        [x.int() // -3, x.to(torch.uint8) + 200, x.short() * 1000, x.bool() + x.to(torch.int8)],
        torch.gcd(x, x + 6),
        torch.div(x, 7, rounding_mode="floor"),
        torch.div(-x, 7, rounding_mode="trunc"),
    )


@behaviour
def promotion_of_types(device: str) -> object:
    x = whole(device, 4, below=9)
    return {
        f"{one} {other}": (x.to(one) + x.to(other), x.to(one) * 2.5, x.to(one)[0] + x.to(other))
        for one in (torch.uint8, torch.int64, torch.bool, *FLOATS)
        for other in (torch.int32, *FLOATS)
    }


@behaviour
def short_floats(device: str) -> object:
    x = normal(device, 5, 7)
    return {
        str(dtype): (
            [x.to(dtype) + 1, x.to(dtype) / 3, x.to(dtype).exp(), x.to(dtype).sum()],
            [x.to(dtype) @ x.to(dtype).T, x.to(dtype).softmax(1), x.to(dtype).mean(0)],
            [x.to(dtype).double(), (x.to(dtype) + x).float(), x.to(dtype).cumsum(1)],
        )
        for dtype in FLOATS
    }


@behaviour
def eight_bit_floats(device: str) -> object:
    x = normal(device, 5, 7)
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    return [x.to(kind).float() for kind in kinds] + [x.to(kinds[0]).view(torch.uint8)]


@behaviour
def conversions(device: str) -> object:
    x = normal(device, 5, 7) * 100
    return (
        [x.to(dtype) for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)],
        [x.half(), x.double(), x.bfloat16(), x.to(torch.complex64), x.type_as(x.long())],
        [x.int().view(torch.float32), x.view(torch.int32), x.long().float(), x.to(x.half())],
    )


@behaviour
def complex_numbers(device: str) -> object:
    x = torch.complex(normal(device, 5, 7), normal(device, 5, 7))
    return (
        [x.conj() * 2, x.conj().imag.contiguous(), torch.view_as_real(x), x.abs(), x.angle()],
        [x @ x.mH, x.real, x.imag, x.exp(), x.sum(), x.prod(), 1j * x, x.conj().resolve_conj()],
        torch.polar(x.abs(), x.angle()),
        torch.view_as_complex(normal(device, 3, 2)),
        torch.view_as_real(x.conj().resolve_conj()),
        [x.is_conj(), x.conj().is_conj(), x.imag.is_neg(), x.conj().imag.is_neg()],
    )


@behaviour
def complex_gradients(device: str) -> object:
    x = normal(device, 5, 7, dtype=torch.complex64).requires_grad_()
    loss = (x.conj() * x.sin()).real.sum() + x.imag.square().sum()
    return torch.autograd.grad(loss, x)


@behaviour
def operands_that_are_numbers_or_on_the_host(device: str) -> object:
    x = normal(device, 5, 7)
    zero_dim = torch.tensor(2.5)
    return (
        [x + zero_dim, zero_dim * x, torch.where(x > 0, x, zero_dim)],
        [x.add(1, alpha=2), torch.pow(2, x), x.fill_(zero_dim), torch.full_like(x, 3)],
    )


@behaviour
def many_tensors_at_once(device: str) -> object:
    tensors = [normal(device, size) for size in (3, 5, 7)]
    torch._foreach_add_(tensors, 1)
    torch._foreach_mul_(tensors, torch._foreach_neg(tensors))
    torch._foreach_addcmul_(tensors, tensors, tensors, value=0.5)
    return tensors, torch._foreach_norm(tensors), torch._foreach_sqrt(torch._foreach_abs(tensors))
