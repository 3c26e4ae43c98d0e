"""Larger programs, as in notebooks: threads, data loaders, saving, tracing, own classes."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import data

from tests.behaviours.comparison import behaviour, flat, normal, whole


@behaviour
def threads_compute_side_by_side(device: str) -> object:
    inputs = [normal(device, 20, 20) for _ in range(8)]

    def work(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = (x @ x).tanh()
            x = x + x.sum().item() / 400
        return x

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, inputs))


@behaviour
def threads_train_models_of_their_own(device: str) -> object:
    models = [nn.Linear(7, 3).to(device) for _ in range(4)]
    inputs = [normal(device, 5, 7) for _ in range(4)]

    def train(model: nn.Module, x: torch.Tensor) -> None:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    threads = [
        threading.Thread(target=train, args=pair) for pair in zip(models, inputs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [list(model.parameters()) for model in models]


@behaviour
def the_device_as_a_default(device: str) -> object:
    torch.set_default_device(device)
    try:
        made = [torch.ones(2), torch.arange(3), torch.tensor([1.0]), torch.rand(2, 2)]
        layer = nn.Linear(3, 2)
        found = layer(torch.ones(1, 3))
    finally:
        torch.set_default_device(None)
    with torch.device(device):
        inside = torch.zeros(3), nn.Linear(2, 2).weight
    return made, found, inside, torch.ones(1).device.type


@behaviour
def the_default_type(device: str) -> object:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(2, device=device), normal(device, 3), 1 / whole(device, 3, below=3)
    finally:
        torch.set_default_dtype(torch.float32)


@behaviour
def names_of_the_device(device: str) -> object:
    x = torch.ones(2)
    places: list[Any] = [device, f"{device}:0", torch.device(device), torch.device(device, 0)]
    if device == "cuda":
        places += [0, torch.device("cuda", torch.cuda.current_device())]
    found = [x.to(place) for place in places[:4]] + [x.to(places[-1])]
    return found, [each.device.index for each in found] if device == "cpu" else [None] * 5


@behaviour
def tensors_of_a_class_of_ones_own(device: str) -> object:
    class NamedTensor(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    seen: list[str] = []
    x = normal(device, 3, 2).as_subclass(NamedTensor)
    y = (x * 2 + 1).sum(0)
    return y.as_subclass(torch.Tensor), type(y).__name__, seen, type(x[0]).__name__


@behaviour
def tensors_that_wrap_others(device: str) -> object:
    class Scaled(torch.Tensor):
        held: torch.Tensor

        @staticmethod
        def __new__(cls, held: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(
                cls, held.shape, dtype=held.dtype, device=held.device
            )
            made.held = held
            return made

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]  # torch calls it on the class
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            plain = torch.utils._pytree.tree_map(
                lambda a: a.held if isinstance(a, cls) else a, args
            )
            return cls(func(*plain, **(kwargs or {})) * 2)

    y = Scaled(normal(device, 3, 2)) + 1
    return y.held, type(y).__name__, y.device.type == device


@behaviour
def operators_observed(device: str) -> object:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Record() as record:
        x = normal(device, 3, 2).add(1).mul(2).sum()
    return x, record.count > 2


@behaviour
def operators_of_ones_own(device: str) -> object:
    name = f"behaviours::twice_{device}"

    @torch.library.custom_op(name, mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_autograd(lambda ctx, grad: grad * 2)
    x = normal(device, 3, 2).requires_grad_()
    y = twice(x)
    return y, torch.autograd.grad(y.sum(), x)


@behaviour
def fake_and_meta_tensors(device: str) -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(3, 4)).to(device)
        y = nn.functional.linear(x, torch.empty(5, 4, device=device))
    empty = torch.empty(3, 4, device="meta") @ torch.empty(4, 5, device="meta")
    return (
        y.shape,
        y.device.type == device,
        empty.shape,
        torch.empty_like(empty, device=device).shape,
    )


@behaviour
def saved_and_loaded(device: str) -> object:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    x = normal(device, 4, 6)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "views": [x, x[1:], x.t(), x.half()]}, file)
    file.seek(0)
    loaded = torch.load(file)
    shared = loaded["views"][0].data_ptr() + 24 == loaded["views"][1].data_ptr()
    file.seek(0)
    hosted = torch.load(file, map_location="cpu")["views"][2].tolist()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return loaded, shared, hosted, torch.load(file, weights_only=False).state_dict()


@behaviour
def pickled_and_copied(device: str) -> object:
    @dataclass
    class WeightsAndViews:
        weight: torch.Tensor
        views: list[torch.Tensor]

    x = normal(device, 4, 6)
    state = copy.deepcopy(WeightsAndViews(x, [x[1:], x.t()]))
    shares = state.weight.data_ptr() == state.views[1].data_ptr() != x.data_ptr()
    layer = nn.Linear(3, 2).to(device)
    loaded = pickle.loads(pickle.dumps([x, layer.state_dict()]))
    return [state.weight, state.views], shares, loaded, copy.deepcopy(layer).state_dict()


@behaviour
def loaders_and_samplers(device: str) -> object:
    class SquaresBelow(data.Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((3,), float(index) ** 2), index

    squares = SquaresBelow()
    weighted = data.WeightedRandomSampler(torch.arange(20.0).tolist(), 10)
    seeded = torch.Generator().manual_seed(3)
    train, test = data.random_split(squares, [15, 5], generator=seeded)
    loaders = {
        "in order": data.DataLoader(squares, 6),
        "shuffled": data.DataLoader(squares, 6, shuffle=True, generator=seeded, drop_last=True),
        "weighted": data.DataLoader(squares, 5, sampler=weighted),
        "part": data.DataLoader(train, 5),
        "rest": data.DataLoader(data.ConcatDataset([test, test]), 4),
        "by workers": data.DataLoader(squares, 6, num_workers=2),
        "some": data.DataLoader(data.Subset(squares, [3, 5]), batch_sampler=[[0], [1, 0]]),
    }
    return {
        name: [(x.to(device).sum(1), y.to(device)) for x, y in loader]
        for name, loader in loaders.items()
    }


@behaviour
def data_made_on_the_device(device: str) -> object:
    tensors = data.TensorDataset(normal(device, 10, 3), whole(device, 10, below=4))
    loader = data.DataLoader(tensors, batch_size=4, shuffle=True)
    return list(loader)


@behaviour
def modules_traced_and_scripted(device: str) -> object:
    x, layer = normal(device, 5, 7), nn.Sequential(nn.Linear(7, 4), nn.ReLU()).to(device)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a warning about all of TorchScript
        traced = torch.jit.trace(layer, x)
        scripted = torch.jit.script(layer)
    return [module(x) for module in (traced, scripted) for _ in range(3)]


@behaviour
def functions_compiled_without_a_code_generator(device: str) -> object:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).relu().sum(0)

    x = normal(device, 5, 7).requires_grad_()
    found = []
    for backend in ("eager", "aot_eager"):
        y = torch.compile(function, backend=backend)(x)
        found.append((y, torch.autograd.grad(y.sum(), x)))
    torch.compiler.reset()
    return found


@behaviour
def models_exported(device: str) -> object:
    model, x = nn.Sequential(nn.Linear(7, 4), nn.GELU()).to(device), normal(device, 5, 7)
    graph = torch.fx.symbolic_trace(model)
    exported = torch.export.export(model, (x,))
    return graph(x), exported.module()(x), [str(node.op) for node in graph.graph.nodes]


@behaviour
def tensors_printed(device: str) -> object:
    kinds = [
        normal("cpu", 3, 4),
        normal("cpu", 40, 400) * 1e5,
        torch.arange(3),
        torch.rand(2, 2) > 0.5,
        normal("cpu", 2, dtype=torch.cfloat),
        torch.tensor(3.5),
        nn.Parameter(torch.ones(2)),
        normal("cpu", 2).requires_grad_() * 2,
    ]
    return [
        "".join(repr(kind.to(device)).split())
        .replace(",device='cuda:0'", "")
        .replace(",grad_fn=<ToCopyBackward0>", "")
        for kind in kinds[:6]
    ] + [str(normal(device, 2)[0].item()), f"{normal(device, 1).item():.4f}"]


@behaviour
def whole_models_of_words(device: str) -> object:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(50, 16), nn.Embedding(12, 16)
            layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.words.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            size = words.shape[1]
            hidden = self.words(words) + self.places(torch.arange(size, device=words.device))
            mask = nn.Transformer.generate_square_subsequent_mask(size, device=words.device)
            return self.head(self.body(hidden, mask=mask, is_causal=True))

    model, words = Words().to(device), whole(device, 4, 12, below=50)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(4):
        logits = model(words)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    made = words[:1, :3]
    with torch.inference_mode():
        for _ in range(6):
            made = torch.cat([made, model(made)[:, -1:].argmax(-1)], 1)
    return losses, made.clone()


@behaviour
def whole_models_of_two_players(device: str) -> object:
    maker = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8)).to(device)
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(device)
    made, judged = (torch.optim.Adam(m.parameters(), 1e-2, (0.5, 0.9)) for m in (maker, judge))
    true, criterion, losses = normal(device, 32, 8), nn.BCEWithLogitsLoss(), []
    one, zero = torch.ones(32, 1, device=device), torch.zeros(32, 1, device=device)
    for _ in range(3):
        false = maker(normal(device, 32, 4))
        judged.zero_grad()
        loss = criterion(judge(true), one) + criterion(judge(false.detach()), zero)
        loss.backward()
        judged.step()
        made.zero_grad()
        fooled = criterion(judge(false), one)
        fooled.backward()
        made.step()
        losses.append((loss.item(), fooled.item()))
    return losses, flat([list(maker.parameters()), list(judge.parameters())])
