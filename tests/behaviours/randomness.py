"""Random numbers: on software devices, the same seed draws what it draws on the CPU."""

from __future__ import annotations

import torch
from torch import distributions, nn

from tests.behaviours.comparison import behaviour, normal


@behaviour
def draws(device: str) -> object:
    x = torch.zeros(5, 7, device=device)
    return {
        "rand": torch.rand(3, 4, device=device),
        "randn": torch.randn(3, 4, device=device, dtype=torch.float64),
        "randint": torch.randint(2, 9, (5,), device=device),
        "randperm": torch.randperm(10, device=device),
        "like": [torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9)],
        "normal": [torch.normal(0.0, 2.0, (3,), device=device), torch.normal(x, x + 1)],
        "half": torch.randn(4, device=device, dtype=torch.half),
        "complex": torch.randn(4, device=device, dtype=torch.cfloat),
        "many": torch.randn(100, 100, device=device),
    }


@behaviour
def draws_in_place(device: str) -> object:
    x = torch.zeros(5, 7, device=device)
    return {
        "uniform": x.clone().uniform_(-1, 1),
        "normal": x.clone().normal_(1, 2),
        "exponential": x.clone().exponential_(2),
        "geometric": x.clone().geometric_(0.3),
        "cauchy": x.clone().cauchy_(),
        "log normal": x.clone().log_normal_(),
        "random": x.clone().random_(3, 10),
        "bernoulli": x.clone().bernoulli_(0.3),
        "part": x.clone()[:, ::2].normal_(),
    }


@behaviour
def draws_by_weight(device: str) -> object:
    weights = torch.arange(1.0, 6.0).to(device)
    return (
        [torch.multinomial(weights, 3), torch.multinomial(weights, 9, replacement=True)],
        [torch.multinomial(weights.expand(2, 5), 1), torch.bernoulli(weights / 6)],
        [torch.poisson(weights), torch.binomial(weights * 2, weights / 6)],
    )


@behaviour
def generators(device: str) -> object:
    one = torch.Generator(device).manual_seed(7)
    first = torch.rand(4, device=device, generator=one)
    state = one.get_state()
    second = torch.randn(20, device=device, generator=one)
    one.set_state(state)
    again = torch.randn(20, device=device, generator=one)
    return (
        [first, second, torch.equal(second, again), one.initial_seed(), one.device.type == device],
        [torch.randperm(9, device=device, generator=one), torch.rand(2, device=device)],
        torch.multinomial(torch.ones(5, device=device), 3, generator=one),
        torch.zeros(4, device=device).normal_(generator=one),
        torch.randint(9, (4,), device=device, generator=one),
        torch.bernoulli(torch.full((4,), 0.5, device=device), generator=one),
        torch.rand(2, device=device, generator=one.clone_state()),
    )


@behaviour
def seeds(device: str) -> object:
    torch.manual_seed(3)
    first = torch.rand(4, device=device)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        other = torch.rand(4, device=device)
    second = torch.rand(4, device=device)
    torch.manual_seed(3)
    return first, other, second, torch.equal(first, torch.rand(4, device=device))


@behaviour
def dropouts(device: str) -> object:
    x = torch.ones(4, 6, 5, device=device)
    layers = {
        "plain": nn.Dropout(0.3),
        "channels": nn.Dropout1d(0.5),
        "alpha": nn.AlphaDropout(0.5),
        "features": nn.FeatureAlphaDropout(0.5),
        "evaluated": nn.Dropout(0.3).eval(),
        "all": nn.Dropout(1.0),
        "leaky": nn.RReLU(),
    }
    found = {}
    for name, layer in layers.items():
        leaf = (x - 2 if name == "leaky" else x).requires_grad_()
        y = layer.to(device)(leaf)
        (slope,) = torch.autograd.grad(y.sum(), leaf)
        # The kernels of CUDA draw other numbers than those of the CPU, from the same distribution.
        kept = y.detach() != 0
        agrees = name in ("alpha", "features") or torch.equal(kept, slope != 0)
        found[name] = (y.shape, y.dtype, agrees, bool((y == x).all()) if name == "evaluated" else 0)
    return found


@behaviour
def gumbel_softmax(device: str) -> object:
    logits = normal(device, 5, 7).requires_grad_()
    torch.manual_seed(1)
    hard = nn.functional.gumbel_softmax(logits, hard=True)
    return hard, nn.functional.gumbel_softmax(logits), torch.autograd.grad(hard[:, 0].sum(), logits)


def described(distribution: distributions.Distribution) -> object:
    """Return samples of a distribution, and its properties of them."""
    torch.manual_seed(1)
    sample = distribution.sample((3,))
    return sample, distribution.log_prob(sample), distribution.mean


@behaviour
def distributions_of_real_values(device: str) -> object:
    mean, scale = normal(device, 4), normal(device, 4).abs() + 0.1
    d = distributions
    return {
        "Normal": described(d.Normal(mean, scale)),
        "Uniform": described(d.Uniform(mean, mean + scale)),
        "Exponential": described(d.Exponential(scale)),
        "Gamma": described(d.Gamma(scale, scale)),
        "Beta": described(d.Beta(scale, scale)),
        "StudentT": described(d.StudentT(scale + 2, mean, scale)),
        "Laplace": described(d.Laplace(mean, scale)),
        "LogNormal": described(d.LogNormal(mean, scale)),
        "Gumbel": described(d.Gumbel(mean, scale)),
        "HalfNormal": described(d.HalfNormal(scale)),
        "Weibull": described(d.Weibull(scale, scale + 1)),
        "VonMises": described(d.VonMises(mean, scale)),
    }


@behaviour
def distributions_of_choices(device: str) -> object:
    logits = normal(device, 4)
    d = distributions
    category = d.Categorical(logits=logits)
    torch.manual_seed(1)
    return {
        "Categorical": [category.sample((5,)), category.entropy(), category.probs],
        "Bernoulli": described(d.Bernoulli(logits=logits)),
        "Binomial": described(d.Binomial(5, logits=logits)),
        "Poisson": described(d.Poisson(logits.exp())),
        "Geometric": described(d.Geometric(logits=logits)),
        "OneHot": described(d.OneHotCategorical(logits=logits)),
        "Multinomial": described(d.Multinomial(6, logits=logits)),
        "NegativeBinomial": described(d.NegativeBinomial(3.0, logits=logits)),
    }


@behaviour
def distributions_of_vectors(device: str) -> object:
    mean, factor = normal(device, 3), normal(device, 3, 3)
    covariance = factor @ factor.T + torch.eye(3, device=device)
    d = distributions
    mixture = d.MixtureSameFamily(
        d.Categorical(logits=normal(device, 3)), d.Normal(mean, mean.exp())
    )
    return {
        "MultivariateNormal": described(d.MultivariateNormal(mean, covariance)),
        "Dirichlet": described(d.Dirichlet(mean.exp())),
        "Independent": described(d.Independent(d.Normal(mean, mean.exp()), 1)),
        "mixture": described(mixture),
        "LowRank": described(d.LowRankMultivariateNormal(mean, factor[:, :1], mean.exp())),
        "LKJ": d.LKJCholesky(3, torch.tensor(1.5, device=device)).sample(),
    }


@behaviour
def distributions_differentiated(device: str) -> object:
    mean = normal(device, 4).requires_grad_()
    scale = (normal(device, 4).abs() + 0.1).requires_grad_()
    d = distributions
    kinds = {
        "Normal": d.Normal(mean, scale),
        "Gamma": d.Gamma(scale, scale),
        "Beta": d.Beta(scale, scale + 1),
        "Dirichlet": d.Dirichlet(scale),
        "StudentT": d.StudentT(scale + 2, mean, scale),
    }
    divergence = d.kl_divergence(d.Normal(mean, scale), d.Normal(mean * 0, scale * 0 + 1))
    found: dict[str, object] = {"KL": torch.autograd.grad(divergence.sum(), (mean, scale))}
    for name, kind in kinds.items():
        torch.manual_seed(2)
        draw = kind.rsample((2,))
        found[name] = (
            draw,
            torch.autograd.grad(draw.square().sum(), (mean, scale), allow_unused=True),
        )
    return found


@behaviour
def distributions_transformed(device: str) -> object:
    d = distributions
    base = d.Normal(torch.zeros(3, device=device), torch.ones(3, device=device))
    squashed = d.TransformedDistribution(base, [d.SigmoidTransform(), d.AffineTransform(1.0, 2.0)])
    torch.manual_seed(1)
    sample = squashed.sample((4,))
    return sample, squashed.log_prob(sample)
