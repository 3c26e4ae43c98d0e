"""Sparse tensors: COO and the compressed layouts."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.behaviours.comparison import behaviour, normal, refusal, whole

# torch warns unless the check of invariants is set explicitly.
torch.sparse.check_sparse_tensor_invariants.disable()

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def parts(result: Any) -> Any:
    """Take sparse tensors apart, in a nest of lists."""
    if isinstance(result, (list, tuple)):
        return [parts(each) for each in result]
    if not isinstance(result, torch.Tensor) or result.layout == torch.strided:
        return result
    found = [str(result.layout), list(result.shape), result.requires_grad]
    result = result.detach()
    if result.layout == torch.sparse_coo:
        return [*found, result.is_coalesced(), result._indices(), result._values()]
    return [
        *found,
        *(getattr(result, name)() for name in COMPRESSED[result.layout]),
        result.values(),
    ]


def coo(device: str, rows: int = 6, columns: int = 6, count: int = 9) -> torch.Tensor:
    """Make a matrix in which some indices occur more than once."""
    indices = torch.stack([whole(device, count, below=n) for n in (rows, columns)])
    return torch.sparse_coo_tensor(
        indices, normal(device, count), (rows, columns), check_invariants=True
    )


def csr(device: str, rows: int = 6, columns: int = 6) -> torch.Tensor:
    return normal(device, rows, columns).relu().to_sparse_csr()


@behaviour
def sparse_tensors_are_made(device: str) -> object:
    dense = normal(device, 4, 6).relu()
    made = [
        coo(device),
        torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], device=device),
        torch.sparse_coo_tensor((3, 4), device=device),
        torch.zeros(3, 4, layout=torch.sparse_coo, device=device),
        torch.sparse_csr_tensor([0, 1, 3], [1, 0, 2], [1.0, 2.0, 3.0], (2, 3), device=device),
        dense.to_sparse(),
        dense.to_sparse(1),
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 3)),
        dense.to_sparse_bsc((2, 2)),
    ]
    return parts([made, [torch.zeros_like(each) for each in made]])


@behaviour
def sparse_tensors_move_between_host_and_device(device: str) -> object:
    here = [coo("cpu"), csr("cpu"), normal("cpu", 4, 4).to_sparse_bsr((2, 2))]
    there = [each.to(device) for each in here]
    target = coo(device)
    target.copy_(coo("cpu"))
    assert all(each.device.type == device for each in there)
    back = [each.cpu() for each in there]
    same = [torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(here, back, strict=True)]
    return parts([there, same, target, [each.double() for each in there]])


@behaviour
def sparse_layouts_are_converted(device: str) -> object:
    start = [coo(device).coalesce(), csr(device), normal(device, 4, 4).relu().to_sparse_csc()]
    results = []
    for each in start:
        results += [each.to_dense(), each.to_sparse(), each.to_sparse_csr(), each.to_sparse_csc()]
        results += [each.to_sparse_bsr((2, 2)), each.to_sparse_bsc((2, 2))]
    return parts(results)


@behaviour
def sparse_arithmetic(device: str) -> object:
    a, b, dense = coo(device), coo(device), normal(device, 6, 6)
    x, y = csr(device), csr(device)
    results = [
        a + b,
        a - b,
        a * b,
        a * dense,
        dense + a,
        a * 3,
        a / 3,
        -a,
        a.sin(),
        a.t(),
        a.norm(),
    ]
    results += [a.coalesce() ** 2, a.coalesce().abs(), a.isnan(), a.transpose(0, 1)]
    results += [x + y, x * 2, x.sin(), -x, x * y]
    return parts(results)


@behaviour
def sparse_tensors_change_in_place(device: str) -> object:
    a, b, dense = coo(device), coo(device), normal(device, 6, 6)
    c = coo(device).coalesce()
    indices = c._indices()
    c.mul_(b.coalesce())
    dense.add_(a, alpha=2)
    d = coo(device).add_(b)
    e = coo(device).mul_(3)
    f = coo(device).sparse_resize_((8, 8), 2, 0)
    out = torch.add(a, b, out=torch.sparse_coo_tensor((6, 6), device=device))
    x = csr(device)
    x.neg_().add_(csr(device))
    return parts([c, indices, dense, d, e, f, out, x, coo(device).zero_(), out.add_(out)])


@behaviour
def sparse_products(device: str) -> object:
    a, b, dense = coo(device), coo(device), normal(device, 6, 3)
    x = csr(device)
    batch = normal(device, 2, 3, 4).relu().to_sparse()
    results = [torch.sparse.mm(a, dense), a @ dense, torch.sparse.mm(a, b), a @ dense[:, 0]]
    results += [torch.sparse.addmm(normal(device, 6, 3), a, dense, beta=0.5, alpha=2.0)]
    results += [
        x @ dense,
        x @ dense[:, 0],
        x @ csr(device),
        torch.bmm(batch, normal(device, 2, 4, 2)),
    ]
    results += [torch.addmm(normal(device, 6, 3), x, dense), torch.hspmm(a.coalesce(), dense)]
    results += [torch.sparse.sampled_addmm(x, normal(device, 6, 2), normal(device, 2, 6))]
    return parts(results)


@behaviour
def sparse_tensors_are_indexed(device: str) -> object:
    a, b = coo(device), coo(device)
    rows = torch.tensor([1, 3], device=device)
    results = [
        a[2],
        a.index_select(0, rows),
        torch.cat([a, b]),
        torch.stack([a, b]),
        a.unsqueeze(0),
    ]
    results += [normal(device, 6, 6).sparse_mask(a.coalesce()), a.sparse_mask(b.coalesce())]
    results += [
        a.narrow_copy(0, 1, 3),
        csr(device)[2],
        a.coalesce().values(),
        a.coalesce().indices(),
    ]
    return parts(results)


@behaviour
def sparse_reductions(device: str) -> object:
    a, x = coo(device), csr(device)
    results = [a.sum(), torch.sparse.sum(a), torch.sparse.sum(a, 0), x.sum(), a.sum(1)]
    results += [torch.sparse.softmax(a, 1), torch.sparse.log_softmax(a.coalesce(), 0)]
    results += [torch.sum(x, 0, keepdim=True), a._nnz(), a.sparse_dim(), a.dense_dim()]
    return parts(results)


@behaviour
def hybrid_sparse_tensors(device: str) -> object:
    indices = torch.tensor([[0, 2, 0], [1, 0, 1]], device=device)
    a = torch.sparse_coo_tensor(indices, normal(device, 3, 4), (3, 2, 4))
    weights = normal(device, 3, 2, 4)
    return parts([a.coalesce(), a.to_dense(), a + a, a * weights, torch.sparse.sum(a, [1]), a[0]])


@behaviour
def derivatives_of_sparse_products(device: str) -> object:
    results = []
    for matrix in (coo(device).coalesce(), csr(device)):
        a, b = matrix.requires_grad_(), normal(device, 6, 4).requires_grad_()
        torch.sparse.mm(a, b).square().sum().backward()
        results += [a.grad, b.grad]
    return parts(results)


@behaviour
def derivatives_through_sparse_tensors(device: str) -> object:
    values = normal(device, 9).requires_grad_()
    a = torch.sparse_coo_tensor(coo(device)._indices(), values, (6, 6)).coalesce()
    b = coo(device).coalesce().requires_grad_()
    dense = normal(device, 6, 6).requires_grad_()
    product = torch.sparse.softmax(a, 1).to_dense() + torch.sparse.sum(b * 2, 0).to_dense()
    (product.square().sum() + dense.to_sparse().to_dense().square().sum()).backward()
    return parts([values.grad, b.grad, dense.grad])


def trained_embedding(device: str, optimizer: type[torch.optim.Optimizer], **options: float) -> Any:
    embedding = nn.Embedding(20, 4, sparse=True)
    embedding.to(device)
    steps = optimizer(embedding.parameters(), lr=0.1, **options)
    losses = []
    for _ in range(6):
        loss = embedding(whole(device, 7, below=20)).square().sum()
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.detach())
    return parts([embedding.weight, embedding.weight.grad, losses])


@behaviour
def sparse_embeddings_are_trained(device: str) -> object:
    optim = torch.optim
    return [
        trained_embedding(device, optim.SGD),
        trained_embedding(device, optim.SGD, momentum=0.9),
        trained_embedding(device, optim.Adagrad),
        trained_embedding(device, optim.SparseAdam),
    ]


@behaviour
def sparse_gradients_of_bags_and_gathers(device: str) -> object:
    bag = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
    bag.to(device)
    bag(whole(device, 3, 7, below=20)).square().sum().backward()
    x = normal(device, 3, 4).requires_grad_()
    torch.gather(x, 0, whole(device, 1, 4, below=3), sparse_grad=True).sum().backward()
    return parts([bag.weight.grad, x.grad])


class GraphNet(nn.Module):
    """Two graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(torch.sparse.mm(adjacency, self.first(x)))
        return torch.sparse.mm(adjacency, self.second(x))


@behaviour
def a_graph_network_is_trained(device: str) -> object:
    results = []
    for compressed in (False, True):
        adjacency = coo(device, 12, 12, 40).coalesce()
        adjacency = adjacency.to_sparse_csr() if compressed else adjacency
        model, x, labels = GraphNet(), normal(device, 12, 5), whole(device, 12, below=3)
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(5):
            loss = functional.cross_entropy(model(adjacency, x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results.append(loss.detach())
        results += list(model.parameters())
    return results


@behaviour
def sparse_tensors_are_saved_and_printed(device: str) -> object:
    results = []
    for each in (coo(device), csr(device)):
        file = io.BytesIO()
        torch.save(each, file)
        file.seek(0)
        results.append(torch.load(file))
        file.seek(0)
        text = str(torch.load(file, map_location="cpu"))
        printed = str(each.cpu())
        results += [text == printed, str(each).count("values=tensor(["), repr(each.shape)]
    return parts(results)


@behaviour
def sparse_tensors_that_cannot_be(device: str) -> object:
    def made(indices: list[list[int]], count: int) -> torch.Tensor:
        moved = torch.tensor(indices).to(device)
        return torch.sparse_coo_tensor(moved, torch.ones(count).to(device), (3, 3))

    def checked() -> None:
        with torch.sparse.check_sparse_tensor_invariants():
            torch.sparse_csr_tensor([0, 2, 1], [0, 1], [1.0, 2.0], (2, 2), device=device)

    a = coo(device)
    return [
        refusal(lambda: made([[0, 9], [0, 1]], 2)),
        refusal(lambda: made([[0, 1], [0, 1]], 3)),
        refusal(checked),
        refusal(lambda: a + coo(device, 5, 5)),
        refusal(lambda: a @ normal(device, 5, 2)),
        refusal(lambda: a.cos()),
        refusal(lambda: a.view(36)),
        refusal(lambda: a.values()),
        (a * 2).to_dense(),
    ]
