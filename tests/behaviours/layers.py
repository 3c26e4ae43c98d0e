"""Layers and losses of ``torch.nn``, forward and backward."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.behaviours.comparison import behaviour, flat, gradients, normal, passes, whole


def passes_of_each(layers: dict[str, nn.Module], *inputs: Any, device: str) -> object:
    return {name: passes(layer, *inputs, device=device) for name, layer in layers.items()}


@behaviour
def activations(device: str) -> object:
    names = (
        "ReLU GELU SiLU Mish ELU SELU CELU Tanh Sigmoid LeakyReLU Hardswish Hardtanh Hardsigmoid"
    )
    names += " Softplus Softsign Hardshrink Softshrink Tanhshrink LogSigmoid PReLU ReLU6 Identity"
    layers: dict[str, nn.Module] = {name: getattr(nn, name)() for name in names.split()}
    layers |= {"Softmax": nn.Softmax(1), "LogSoftmax": nn.LogSoftmax(1), "Softmin": nn.Softmin(1)}
    layers |= {"GLU": nn.GLU(1), "tanh GELU": nn.GELU("tanh"), "Threshold": nn.Threshold(0.1, 2)}
    return passes_of_each(layers, normal(device, 5, 8), device=device)


@behaviour
def softmax_of_low_precision_in_single_precision(device: str) -> object:
    results = []
    for dtype in (torch.half, torch.bfloat16):
        x = normal(device, 5, 8).to(dtype).requires_grad_()
        for function in (functional.softmax, functional.log_softmax):
            y = function(x, 1, dtype=torch.float32)
            results += [y, *torch.autograd.grad(y[:, 0].sum(), x)]
    return results


@behaviour
def linear_layers(device: str) -> object:
    x = normal(device, 4, 5, 7)
    return (
        passes(nn.Linear(7, 3), x, device=device),
        passes(nn.Linear(7, 3, bias=False), x[0, 0], device=device),
        passes(nn.Bilinear(7, 7, 3), x, x + 1, device=device),
        passes(
            nn.Sequential(nn.Flatten(), nn.Linear(35, 2), nn.Unflatten(1, (2, 1))), x, device=device
        ),
        passes(nn.Linear(7, 3), x.transpose(0, 1), device=device),
    )


@behaviour
def convolutions(device: str) -> object:
    x = normal(device, 2, 4, 9, 9)
    layers = {
        "plain": nn.Conv2d(4, 6, 3),
        "padded": nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"),
        "strided": nn.Conv2d(4, 6, (3, 5), stride=2, padding=(1, 2), bias=False),
        "grouped": nn.Conv2d(4, 8, 3, groups=4),
        "depthwise": nn.Conv2d(4, 4, 3, groups=4, padding=1),
        "dilated": nn.Conv2d(4, 6, 3, dilation=2),
        "pointwise": nn.Conv2d(4, 6, 1),
        "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
        "without a batch": nn.Sequential(nn.Flatten(0, 1), nn.Conv2d(8, 3, 3)),
        "channels last": nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
    }
    found = passes_of_each(layers, x, device=device)
    last = passes(nn.Conv2d(4, 6, 3), x.to(memory_format=torch.channels_last), device=device)
    return found, last


@behaviour
def convolutions_of_other_dimensions(device: str) -> object:
    line, volume = normal(device, 2, 4, 9), normal(device, 2, 3, 5, 6, 7)
    return (
        passes(nn.Conv1d(4, 6, 3, padding=1), line, device=device),
        passes(nn.ConvTranspose1d(4, 6, 3, stride=2), line, device=device),
        passes(nn.Conv3d(3, 4, 3, padding=1), volume, device=device),
        passes(nn.ConvTranspose3d(3, 2, 2, stride=2), volume, device=device),
    )


@behaviour
def poolings(device: str) -> object:
    x = normal(device, 2, 4, 9, 9)
    layers = {
        "max": nn.MaxPool2d(2),
        "max with places": nn.MaxPool2d(3, 2, padding=1, return_indices=True),
        "average": nn.AvgPool2d(2, padding=1, count_include_pad=False),
        "adaptive average": nn.AdaptiveAvgPool2d((3, 2)),
        "adaptive average of all": nn.AdaptiveAvgPool2d(1),
        "adaptive max": nn.AdaptiveMaxPool2d(4),
        "power": nn.LPPool2d(2, 3),
    }
    found = passes_of_each(layers, x, device=device)
    pooled, places = functional.max_pool2d(x, 2, return_indices=True)
    line, volume = x[0], x[:, :, None].expand(2, 4, 5, 9, 9).contiguous()
    return (
        found,
        functional.max_unpool2d(pooled, places, 2, output_size=(9, 9)),
        passes_of_each({"max": nn.MaxPool1d(2), "average": nn.AvgPool1d(3)}, line, device=device),
        passes_of_each({"max": nn.MaxPool3d(2), "average": nn.AvgPool3d(2)}, volume, device=device),
    )


@behaviour
def normalisations(device: str) -> object:
    x = normal(device, 3, 4, 5, 5)
    layers = {
        "batch": nn.BatchNorm2d(4),
        "batch, evaluated": nn.BatchNorm2d(4).eval(),
        "batch, cumulative": nn.BatchNorm2d(4, momentum=None),
        "batch without state": nn.BatchNorm2d(4, affine=False, track_running_stats=False),
        "layer": nn.LayerNorm((5, 5)),
        "layer without weights": nn.LayerNorm(5, elementwise_affine=False),
        "group": nn.GroupNorm(2, 4),
        "instance": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "root mean square": nn.RMSNorm(5),
        "local response": nn.LocalResponseNorm(2),
    }
    last = x.to(memory_format=torch.channels_last)
    return (
        passes_of_each(layers, x, device=device),
        passes(nn.BatchNorm2d(4), last, device=device),
        passes(nn.BatchNorm1d(5), x[0, 0], device=device),
        passes(nn.BatchNorm3d(4), x[:, :, None], device=device),
    )


@behaviour
def group_norms_of_channels_that_lie_last(device: str) -> object:
    x, tokens = normal(device, 3, 4, 5, 5), normal(device, 3, 25, 4)
    layers = {"trained": nn.GroupNorm(2, 4), "without weights": nn.GroupNorm(2, 4, affine=False)}
    inputs = (
        x.to(memory_format=torch.channels_last),
        tokens.transpose(1, 2).unflatten(2, (5, 5)),
        tokens.transpose(1, 2),
        x[:, :, None].to(memory_format=torch.channels_last_3d),
    )
    with torch.no_grad():
        evaluated = [nn.GroupNorm(4, 4).to(device)(each) for each in inputs]
    return evaluated, [passes_of_each(layers, each, device=device) for each in inputs]


@behaviour
def a_penalty_on_what_a_group_norm_passes_back(device: str) -> object:
    x = normal(device, 3, 4, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    norm = nn.GroupNorm(2, 4).to(device)
    (passed,) = torch.autograd.grad(norm(x).sin().sum(), x, create_graph=True)
    passed.square().sum().backward()
    # The gradients of gradients come from a formula that copies: other sums, so no exact values.
    assert x.grad is not None
    assert norm.weight.grad is not None
    return [(each.shape, torch.round(each * 1e3)) for each in (x.grad, norm.weight.grad)]


@behaviour
def embeddings(device: str) -> object:
    words = whole(device, 4, 6, below=9)
    starts = torch.tensor([0, 3, 3, 10], device=device)
    weights = normal(device, 24)
    return (
        passes(nn.Embedding(9, 5), words, device=device),
        passes(nn.Embedding(9, 5, padding_idx=0, max_norm=1.0), words, device=device),
        passes(nn.Embedding(9, 5, scale_grad_by_freq=True), words, device=device),
        [
            passes(nn.EmbeddingBag(9, 5, mode=mode), words, device=device)
            for mode in ("sum", "mean", "max")
        ],
        passes(nn.EmbeddingBag(9, 5, mode="sum"), words.flatten(), starts, weights, device=device),
        functional.embedding_bag(words, normal(device, 9, 5)),
    )


@behaviour
def images_resized(device: str) -> object:
    x = normal(device, 2, 4, 6, 6)
    kinds: dict[str, dict[str, Any]] = {
        "nearest": {},
        "nearest-exact": {},
        "bilinear": {"align_corners": False},
        "bilinear, corners": {"mode": "bilinear", "align_corners": True},
        "bicubic": {"align_corners": False},
        "bilinear, antialiased": {"mode": "bilinear", "antialias": True},
        "area": {},
    }
    found = {}
    for name, options in kinds.items():
        leaf = x.clone().requires_grad_()
        y = functional.interpolate(leaf, size=(9, 4), **{"mode": name, **options})
        found[name] = [y, gradients(y, leaf)]
    return (
        found,
        passes(nn.Upsample(scale_factor=2.5, mode="bilinear"), x, device=device),
        passes(nn.PixelShuffle(2), x, device=device),
        passes(nn.PixelUnshuffle(3), x, device=device),
        passes(nn.ChannelShuffle(2), x, device=device),
        functional.interpolate(x[0], scale_factor=2, mode="linear"),
    )


@behaviour
def images_sampled_and_unfolded(device: str) -> object:
    x = normal(device, 2, 4, 6, 6).requires_grad_()
    turn = normal(device, 2, 2, 3).requires_grad_()
    grid = functional.affine_grid(turn, [2, 4, 5, 5], align_corners=False)
    sampled = functional.grid_sample(x, grid, align_corners=False, padding_mode="border")
    return (
        [grid, sampled, gradients(sampled, x, turn)],
        passes(nn.Unfold(3, padding=1, stride=2), x, device=device),
        passes(nn.Fold((6, 6), 2, stride=2), normal(device, 2, 12, 9), device=device),
        passes(nn.ZeroPad2d(2), x, device=device),
        passes(nn.ReflectionPad2d(2), x, device=device),
        passes(nn.ReplicationPad2d((1, 2, 0, 1)), x, device=device),
        passes(nn.CircularPad2d(1), x, device=device),
    )


@behaviour(relative=1e-6)
def recurrent_layers(device: str) -> object:
    x = normal(device, 3, 5, 7)
    layers = {
        "LSTM": nn.LSTM(7, 4, batch_first=True),
        "two LSTM, both ways": nn.LSTM(7, 4, num_layers=2, bidirectional=True),
        "GRU": nn.GRU(7, 4, num_layers=2),
        "RNN": nn.RNN(7, 4, nonlinearity="relu"),
    }
    cells = {"LSTM": nn.LSTMCell(7, 4), "GRU": nn.GRUCell(7, 4), "RNN": nn.RNNCell(7, 4)}
    return (
        passes_of_each(dict(layers), x, device=device),
        passes_of_each(dict(cells), x[:, 0], device=device),
    )


@behaviour(relative=1e-6)
def recurrent_layers_of_packed_sequences(device: str) -> object:
    x, rnn = normal(device, 3, 5, 7).requires_grad_(), nn.utils.rnn
    found = []
    for layer in (nn.LSTM(7, 4, batch_first=True), nn.GRU(7, 4, batch_first=True)):
        layer.to(device)
        packed = rnn.pack_padded_sequence(
            x, torch.tensor([3, 5, 2]), batch_first=True, enforce_sorted=False
        )
        results, state = layer(packed)
        padded, lengths = rnn.pad_packed_sequence(results, batch_first=True)
        found.append((padded, lengths.tolist(), flat(state), gradients(padded, x)))
    return found


@behaviour
def attention(device: str) -> object:
    q = normal(device, 2, 4, 10, 16)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"is_causal": True},
        "masked": {"attn_mask": torch.rand(10, 10).gt(0.3).to(device)},
        "biased": {"attn_mask": normal(device, 10, 10)},
        "scaled": {"scale": 0.1},
    }
    found = {}
    for name, options in kinds.items():
        leaves = [q.clone().requires_grad_() for _ in range(3)]
        result = functional.scaled_dot_product_attention(*leaves, **options)
        found[name] = (result, gradients(result, *leaves))
    few = normal(device, 2, 2, 10, 16)
    found["grouped"] = functional.scaled_dot_product_attention(q, few, few, enable_gqa=True)
    return found


@behaviour
def attention_with_dropout(device: str) -> object:
    q = normal(device, 2, 4, 10, 16)
    result = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    return result.shape, bool(result.isfinite().all())


@behaviour
def transformer_layers(device: str) -> object:
    x, target = normal(device, 2, 5, 8), normal(device, 2, 6, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5).to(device)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2
    )
    heads = nn.MultiheadAttention(8, 2, batch_first=True).to(device)
    leaf = x.clone().requires_grad_()
    found = encoder.to(device)(leaf, mask=mask)
    weighted = heads(leaf, leaf, leaf, key_padding_mask=hidden)
    return (
        [found, gradients(found, leaf), list(weighted), gradients(weighted, leaf)],
        passes(
            nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True), target, x, device=device
        ),
        passes(nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True), x, target, device=device),
    )


@behaviour
def transformer_layers_evaluated(device: str) -> object:
    x = normal(device, 2, 5, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
    plain = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    heads = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():  # torch takes a fused path, which training does not
        return (
            [each.to(device).eval()(x) for each in (layer, plain)],
            list(heads.to(device).eval()(x, x, x)),
            list(heads(x, x, x, need_weights=False))[:1],
        )


# On the CPU torch computes this with nested tensors, and has zeros where a key is hidden.
@behaviour(relative=1e-6)
def transformer_layers_evaluated_with_hidden_keys(device: str) -> object:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).to(device).eval()
    hidden = torch.tensor([[False, False, True], [False, False, False]], device=device)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that nested tensors are a prototype
        return encoder(normal(device, 2, 3, 8), src_key_padding_mask=hidden)[~hidden].clone()


@behaviour
def losses_of_real_values(device: str) -> object:
    x, y = normal(device, 6, 5), normal(device, 6, 5)
    probability, sign = normal(device, 6, 5).sigmoid(), normal(device, 6, 5).sign()
    targets: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "MSE": (nn.MSELoss(), y),
        "MSE of each": (nn.MSELoss(reduction="none"), y),
        "L1": (nn.L1Loss(reduction="sum"), y),
        "smooth L1": (nn.SmoothL1Loss(), y),
        "Huber": (nn.HuberLoss(delta=0.5), y),
        "BCE with logits": (nn.BCEWithLogitsLoss(), probability),
        "weighed BCE": (nn.BCEWithLogitsLoss(pos_weight=torch.full((5,), 2.0)), probability),
        "Poisson": (nn.PoissonNLLLoss(), probability),
        "KL": (nn.KLDivLoss(reduction="batchmean"), probability),
        "logarithmic KL": (nn.KLDivLoss(reduction="batchmean", log_target=True), probability.log()),
    }
    found: dict[str, object] = {
        name: passes(loss, x, target, device=device) for name, (loss, target) in targets.items()
    }
    leaf = x.clone().requires_grad_()
    for loss in (nn.SoftMarginLoss(), nn.HingeEmbeddingLoss(), nn.MultiLabelSoftMarginLoss()):
        value = loss(leaf, sign)
        found[type(loss).__name__] = [value, gradients(value, leaf)]
    return found, passes(nn.BCELoss(), x.sigmoid(), probability, device=device)


@behaviour
def losses_of_classes(device: str) -> object:
    x, labels = normal(device, 6, 5), whole(device, 6, below=5)
    weights = torch.arange(1.0, 6.0)
    some = labels.clone()
    some[::2] = -100
    losses: dict[str, nn.Module] = {
        "cross entropy": nn.CrossEntropyLoss(),
        "weighed": nn.CrossEntropyLoss(weight=weights),
        "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
        "of each": nn.CrossEntropyLoss(reduction="none"),
        "multi-margin": nn.MultiMarginLoss(),
        "NLL": nn.NLLLoss(weight=weights),
    }
    images = normal(device, 2, 5, 3, 3)
    return (
        passes_of_each(losses, x, labels, device=device),
        passes(nn.CrossEntropyLoss(), x, some, device=device),
        passes(nn.CrossEntropyLoss(), x, x.softmax(1), device=device),
        passes(nn.CrossEntropyLoss(), images, whole(device, 2, 3, 3, below=5), device=device),
        passes(nn.AdaptiveLogSoftmaxWithLoss(5, 20, [3, 9], 2.0), x, labels, device=device)[1],
    )


@behaviour
def losses_of_pairs(device: str) -> object:
    x, y, z = (normal(device, 6, 5) for _ in range(3))
    sign = normal(device, 6).sign()
    return (
        passes(nn.TripletMarginLoss(), x, y, z, device=device),
        passes(nn.CosineEmbeddingLoss(), x, y, sign, device=device),
        passes(nn.MarginRankingLoss(margin=0.1), x[:, 0], y[:, 0], sign, device=device),
        passes(nn.GaussianNLLLoss(), x, y, z.abs(), device=device),
        passes(nn.TripletMarginWithDistanceLoss(swap=True), x, y, z, device=device),
    )


@behaviour
def losses_of_sequences(device: str) -> object:
    x = normal(device, 10, 2, 5).log_softmax(2).requires_grad_()
    labels = whole(device, 2, 4, below=4) + 1
    loss = functional.ctc_loss(x, labels, torch.tensor([10, 9]), torch.tensor([4, 3]))
    return loss, gradients(loss, x)


@behaviour
def containers(device: str) -> object:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
            self.named = nn.ModuleDict({"one": nn.Linear(7, 2)})
            self.scale = nn.ParameterList([nn.Parameter(torch.ones(7)) for _ in range(3)])
            self.register_buffer("shift", torch.arange(7.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for step, scale in zip(self.steps, self.scale, strict=True):
                x = step(x) * scale + self.shift
            return self.named["one"](x)

    return passes(Many(), normal(device, 5, 7), device=device)


@behaviour
def lazy_layers(device: str) -> object:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(2, 3, 5, 5))
    return passes(model, normal(device, 2, 3, 5, 5), device=device)
