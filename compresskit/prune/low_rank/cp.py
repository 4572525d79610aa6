"""CP decomposition of convolutions by alternating least squares (Lebedev et al., 1412.6553).

W[o, i, y, x] ~ sum over r of outputs[o, r] inputs[r, i] rows[r, y] columns[r, x]: 1x1 to the rank, a column of the window and a
row of it for each channel alone, 1x1 to the outputs. The last factor is the least squares solution for the outputs on data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STARTS, FIRST_SWEEPS = 3, 10  # beginnings that are tried, and how far, before the best goes on
SWEEPS = 80  # of alternating least squares, at most
SETTLED = 3e-4  # of the error, relative, below which a sweep is the last
RIDGE = 1e-8  # of the mean of a Gram matrix's diagonal, which keeps factors from growing against one another


@dataclass(frozen=True, kw_only=True)
class CPFactors:
    """Factors of a weight (out, in, y, x), in float64.

    outputs: (out, rank). inputs: (rank, in). rows: (rank, y). columns: (rank, x).
    lost: mean squared error of the output, as a fraction of its variance.
    """

    outputs: Tensor
    inputs: Tensor
    rows: Tensor
    columns: Tensor
    lost: float

    def whole(self) -> Tensor:
        """(out, in, y, x) the product."""
        return torch.einsum("or,ri,ry,rx->oiyx", self.outputs, self.inputs, self.rows, self.columns)


def cp_factors(
    weight: Tensor,
    rank: int,
    *,
    whiten: Tensor | None = None,
    unwhiten: Tensor | None = None,
    moment: Tensor | None = None,
    variance: float | None = None,
) -> CPFactors:
    """Factors of a rank for a weight, always the same for the same weight.

    Args:
        weight: (out, in, y, x).
        rank: number of terms.
        whiten, unwhiten: (in, in) C^1/2 V and V' C^-1/2 for inputs of covariance C, so that errors count as they do in the
            outputs; None for C = 1.
        moment: (in y x, in y x) covariance of all that the weight multiplies, or its mean products where the mean counts, too;
            None for 1.
        variance: of the outputs; None for what `moment` gives.
    """
    weight = weight.double()
    even = weight if whiten is None else torch.einsum("oiyx,ij->ojyx", weight, whiten)
    found = _alternating((even / even.norm().clamp(min=1e-300)).float(), rank)
    inputs, rows, columns = (factor.double() for factor in found)
    if unwhiten is not None:
        inputs = unwhiten.T @ inputs
    terms = torch.einsum("ir,yr,xr->iyxr", inputs, rows, columns).flatten(0, 2)
    flat = weight.flatten(1)
    seen = terms if moment is None else moment @ terms
    outputs = _least_squares(seen.T @ terms, flat @ seen)
    rest = flat - outputs @ terms.T
    variance = weighted_energy(flat, moment) if variance is None else variance
    lost = weighted_energy(rest, moment) / max(variance, 1e-300)
    return CPFactors(outputs=outputs, inputs=inputs.T, rows=rows.T, columns=columns.T, lost=lost)


def weighted_energy(flat: Tensor, moment: Tensor | None) -> float:
    """Mean square of the outputs of weights (out, columns) on inputs of mean products; the sum of their squares for None."""
    return float((flat * (flat if moment is None else flat @ moment)).sum())


def _alternating(target: Tensor, rank: int) -> list[Tensor]:
    """Factors (size, rank) of the input channels, rows and columns of a tensor (out, in, y, x) of norm 1."""
    generator = torch.Generator().manual_seed(0)
    begun = []
    for _ in range(STARTS):
        drawn = [
            torch.randn(size, rank, generator=generator, dtype=torch.float32, device="cpu").to(target) for size in target.shape
        ]
        begun.append(_swept(target, drawn, FIRST_SWEEPS))
    _, best = min(begun, key=lambda found: found[0])
    return _swept(target, best, SWEEPS)[1][1:]


def _swept(target: Tensor, factors: list[Tensor], sweeps: int) -> tuple[float, list[Tensor]]:
    """The best factors that up to so many sweeps from others come to, and the squares that they leave."""
    before = least = float("inf")
    factors, best = [*factors], factors
    for _ in range(sweeps):
        for mode in range(4):
            others = [factor for i, factor in enumerate(factors) if i != mode]
            gram = (others[0].T @ others[0]) * (others[1].T @ others[1]) * (others[2].T @ others[2])
            product = _all_but(target, factors, mode)
            factors[mode] = _least_squares(gram, product)
        gram = gram * (factors[3].T @ factors[3])
        error = max(0.0, 1 - 2 * float((product * factors[3]).sum()) + float(gram.sum()))
        for i in (1, 2, 3):  # the first takes the sizes, so that none grows against another
            factors[i] = factors[i] / factors[i].norm(dim=0).clamp(min=1e-30)
        if error < least:
            least, best = error, [*factors]
        if before - error < SETTLED * error:
            break
        before = error
    return least, best


def _all_but(target: Tensor, factors: list[Tensor], mode: int) -> Tensor:
    """(size of the mode, rank) the target times the factors of all other modes."""
    o, i, y, x = factors
    if mode < 2:  # the window first, which is small
        inner = torch.einsum("oiyx,yr,xr->oir", target, y, x)
        return torch.einsum("oir,ir->or", inner, i) if mode == 0 else torch.einsum("oir,or->ir", inner, o)
    inner = torch.einsum("oiyx,or->iyxr", target, o)
    inner = torch.einsum("iyxr,ir->yxr", inner, i)
    return torch.einsum("yxr,xr->yr", inner, x) if mode == 2 else torch.einsum("yxr,yr->xr", inner, y)


def _least_squares(gram: Tensor, product: Tensor) -> Tensor:
    """(rows, rank) X that is nearest to X gram = product."""
    exact = gram.double()  # of terms that are nearly alike, single precision would give anything
    identity = torch.eye(len(gram), dtype=exact.dtype, device=exact.device)
    ridge = RIDGE * exact.diagonal().mean().clamp(min=1e-30) * identity
    return torch.linalg.solve(exact + ridge, product.double().T).T.to(product.dtype)
