"""Products, decompositions, Fourier transforms and distances."""

from __future__ import annotations

import torch

from tests.behaviours.comparison import behaviour, gradients, normal


@behaviour
def products(device: str) -> object:
    x, y, batch = normal(device, 5, 7), normal(device, 7, 3), normal(device, 4, 7, 2)
    return (
        [x @ y, x.mm(y), x.T.contiguous() @ x, x @ y[:, 0], y[:, 0].dot(y[:, 1]), x.mv(y[:, 0])],
        [x @ batch, torch.bmm(batch.mT, batch), torch.addmm(x @ y, x, y, beta=0.5, alpha=2)],
        [torch.baddbmm(batch.mT @ batch, batch.mT, batch), torch.outer(x[0], x[1])],
        [torch.linalg.multi_dot([x, y, y.T]), torch.matrix_power(x @ x.T, 3), torch.chain_matmul],
        [
            torch.tensordot(x, y, 1),
            torch.kron(x, y),
            torch.inner(x, x),
            torch.linalg.cross(y, y + 1),
        ],
        [torch.addmv(x[:, 0], x, y[:, 0]), torch.addr(x, x[:, 0], x[0], beta=0.3), x.T.mm(x)],
    )


@behaviour
def sums_of_products(device: str) -> object:
    x, batch = normal(device, 5, 7), normal(device, 2, 3, 5, 7)
    formulas = {
        "ij,kj->ik": (x, x),
        "ij->ji": (x,),
        "ij->": (x,),
        "ii->i": (x[:, :5],),
        "bhqd,bhkd->bhqk": (batch, batch),
        "bhqk,kd->bhqd": (batch, x.T.contiguous()),
        "...ij,...kj->...ik": (batch, batch),
        "i,j->ij": (x[0], x[1]),
        "ij,ij->": (x, x),
        "ij,jk,kl->il": (x, x.T, x),
    }
    return {formula: torch.einsum(formula, *operands) for formula, operands in formulas.items()}


@behaviour
def decompositions(device: str) -> object:
    x = normal(device, 5, 7)
    square = x @ x.T + 5 * torch.eye(5, device=device)
    linalg = torch.linalg
    return (
        [*linalg.svd(x), *linalg.svd(x, full_matrices=False), linalg.svdvals(x)],
        [*linalg.qr(x), *linalg.qr(x, "complete"), *linalg.eigh(square), linalg.eigvalsh(square)],
        [
            linalg.cholesky(square),
            *linalg.lu(square),
            *linalg.lu_factor(square),
            *linalg.eig(square),
        ],
        [*linalg.ldl_factor(square), linalg.householder_product(*torch.geqrf(x[:, :5]))],
    )


@behaviour
def equations(device: str) -> object:
    x = normal(device, 5, 7)
    square = x @ x.T + 5 * torch.eye(5, device=device)
    linalg = torch.linalg
    return (
        [linalg.solve(square, x), linalg.inv(square), linalg.pinv(x), linalg.det(square)],
        [*linalg.slogdet(square), linalg.matrix_rank(x)],
        [linalg.solve_triangular(square.tril(), x, upper=False), linalg.matrix_exp(square / 9)],
        [torch.cholesky_solve(x, linalg.cholesky(square)), torch.cholesky_inverse(square.tril())],
        [
            linalg.cond(square),
            torch.logdet(square),
            linalg.inv_ex(square)[1],
            linalg.tensorinv(square.view(5, 5), ind=1),
        ],
    )


@behaviour
def equations_of_complex_numbers(device: str) -> object:
    x = normal(device, 4, 4, dtype=torch.complex64)
    factors = torch.linalg.lu_factor(x)
    return [
        torch.linalg.lu_solve(*factors, x[:2] if not left else x[:, :2], left=left, adjoint=adjoint)
        for left in (True, False)
        for adjoint in (True, False)
    ]


@behaviour(relative=1e-5)
def least_squares(device: str) -> object:
    # LAPACK's result also depends on how the matrices are aligned in memory.
    x = normal(device, 9, 4)
    return torch.linalg.lstsq(x, normal(device, 9, 2)).solution, torch.linalg.pinv(x) @ x


@behaviour
def gradients_of_algebra(device: str) -> object:
    x = normal(device, 4, 4).requires_grad_()
    eye = 5 * torch.eye(4, device=device)
    return (
        gradients([torch.linalg.inv(x + eye), torch.linalg.solve(x + eye, x)], x),
        gradients([torch.linalg.cholesky(x @ x.T + eye), torch.linalg.svdvals(x)], x),
        gradients([torch.linalg.det(x), torch.logdet(x @ x.T + eye)], x),
        gradients([torch.einsum("ij,kj->ik", x, x), torch.kron(x, x)], x),
        gradients(torch.linalg.eigh(x + x.T).eigenvalues, x),
    )


@behaviour
def fourier_transforms(device: str) -> object:
    x = normal(device, 6, 8)
    fft = torch.fft
    return (
        [fft.fft(x), fft.ifft(x), fft.rfft2(x), fft.irfft(fft.rfft(x)), fft.fftn(x), fft.hfft(x)],
        [
            fft.fftshift(x),
            fft.ifftshift(x),
            fft.fftfreq(8, device=device),
            fft.fft(x, norm="ortho"),
        ],
        [fft.fft2(x, dim=(1, 0)), fft.rfft(x, n=5), fft.irfft2(fft.rfft2(x), s=(6, 8))],
    )


@behaviour
def windows(device: str) -> object:
    return [
        make(7, device=device, **more)
        for make in (
            torch.bartlett_window,
            torch.blackman_window,
            torch.hamming_window,
            torch.hann_window,
            torch.kaiser_window,
        )
        for more in ({}, {"periodic": False}, {"dtype": torch.float64})
    ] + [torch.kaiser_window(6, periodic=True, beta=10.0, device=device)]


@behaviour
def spectrograms(device: str) -> object:
    x, window = normal(device, 2, 400), torch.hann_window(64, device=device)
    spectrum = torch.stft(x, 64, 16, window=window, return_complex=True)
    return spectrum, torch.istft(spectrum, 64, 16, window=window), spectrum.abs()


@behaviour
def distances(device: str) -> object:
    x, y = normal(device, 30, 3).requires_grad_(), normal(device, 40, 3)
    functional = torch.nn.functional
    return (
        [torch.cdist(x, y), torch.cdist(x, y, p=1), functional.pdist(x), torch.cdist(x, x)],
        [functional.cosine_similarity(x[:, None], y[None], dim=-1), functional.normalize(x)],
        [functional.pairwise_distance(x, y[:30]), gradients(torch.cdist(x, y), x)],
    )
