"""Second moments of keys, values and queries, and the projections that lose least of them.

Everything here is float64: calibration is not in a hurry, and the square of a vector has twice the digits of the vector. Leading
dimensions (layers, heads) are free, and each index is treated by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, whole_number

# Rows that are made float64 at a time, so that a long prompt is never held twice.
_PIECE = 1024


class Projection(NamedTuple):
    """From a vector x to `encode @ x`, and back with `decode`. All float64.

    Args:
        encode: (..., rank, d).
        decode: (..., d, rank).
        energies: (..., d), of all directions, the largest first; the first `rank` are kept.
    """

    encode: torch.Tensor
    decode: torch.Tensor
    energies: torch.Tensor

    @property
    def kept(self) -> torch.Tensor:
        """The share of the energy that is kept, (...); 1 where there is none to lose."""
        total = self.energies.sum(-1)
        top = self.energies[..., : self.encode.shape[-2]].sum(-1)
        return torch.where(total > 0, top / total, torch.ones_like(total))


class Moments:
    """Sums of outer products, one for each leading index, of vectors that are never held.

    Args:
        lead: The leading dimensions, such as (heads,).
        dim: Size of a vector.
        device: Where the sums are.
    """

    def __init__(self, lead: Sequence[int], dim: int, device: torch.device | str | None = None) -> None:
        self.total = torch.zeros((*lead, dim, dim), dtype=torch.float64, device=device)
        self.count = torch.zeros(tuple(lead), dtype=torch.int64, device=device)

    @property
    def mean(self) -> torch.Tensor:
        """The second moment, (*lead, d, d): the mean outer product, and 0 before the first vector."""
        return self.total / self.count.clamp_min(1)[..., None, None]

    def add(self, rows: torch.Tensor, valid: torch.Tensor | None = None) -> None:
        """Counts vectors in.

        Args:
            rows: (..., *lead, n, d); what comes before `lead`, such as a batch, is summed.
            valid: Booleans that broadcast to (..., *lead, n); rows where it is False don't count, whatever they hold.
        """
        own = self.total.ndim - 1
        lead, dim = self.count.shape, self.total.shape[-1]
        if rows.ndim < own + 1 or rows.shape[-1] != dim or rows.shape[-own - 1 : -2] != lead:
            raise ConfigError.of("rows", f"shape (..., {', '.join(map(str, (*lead, 'n', dim)))})", tuple(rows.shape))
        rows = masked(rows.detach(), valid)
        counted = torch.ones((), dtype=torch.bool, device=rows.device) if valid is None else valid
        before = tuple(range(rows.ndim - own - 1))
        total, count = second_moment(rows), counted.expand(rows.shape[:-1]).sum(-1)
        self.total += total.sum(before) if before else total
        self.count += count.sum(before) if before else count

    def merge(self, other: Moments) -> None:
        """Counts in what another one has counted.

        Args:
            other: Of the same shape, on any device.
        """
        if other.total.shape != self.total.shape:
            raise ConfigError.of("other", f"moments of shape {tuple(self.total.shape)}", tuple(other.total.shape))
        self.total += other.total.to(self.total.device)
        self.count += other.count.to(self.count.device)


def masked(rows: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Rows with zeros where they don't count.

    Args:
        rows: (..., n, d).
        valid: Booleans that broadcast to (..., n). None: all count.
    """
    if valid is None:
        return rows
    if valid.dtype != torch.bool:
        raise ConfigError.of("valid", "booleans", valid.dtype)
    # Not a product: what is not valid may be NaN.
    return rows.masked_fill(~valid.unsqueeze(-1), 0.0)


def second_moment(rows: torch.Tensor) -> torch.Tensor:
    """The sum of the rows' outer products, (..., d, d) in float64.

    Args:
        rows: (..., n, d).
    """
    wide = rows[..., :_PIECE, :].double()
    total = wide.mT @ wide
    for start in range(_PIECE, rows.shape[-2], _PIECE):
        wide = rows[..., start : start + _PIECE, :].double()
        total += wide.mT @ wide
    return total


def principal(gram: torch.Tensor, rank: int) -> Projection:
    """The orthogonal projection that loses least: E |x - decode @ encode @ x|^2 is as small as `rank` allows.

    Args:
        gram: Second moment, (..., d, d), or any multiple of it.
        rank: How many directions to keep, 1 to d.
    """
    _check_square("gram", gram)
    _check_rank(rank, gram.shape[-1])
    energies, directions = _descending(gram)
    encode = directions[..., :rank, :].contiguous()
    return Projection(encode, encode.mT.contiguous(), energies.clamp_min(0.0))


def in_metric(gram: torch.Tensor, metric: torch.Tensor, rank: int, damping: float = 1e-6) -> Projection:
    """The oblique projection that loses least where it counts: E (x - x')' metric (x - x') for x' = decode @ encode @ x.

    For keys the metric is the second moment of the queries that will meet them, and what is lost is the mean squared error of a logit.
    Vectors are taken to coordinates in which the metric is the identity, `M^(1/2) x`; there the best projection is an orthogonal one. Its
    coefficients keep that property: an error in them counts the same in every direction.

    **Damping.** A metric that is 0 in some direction says nothing about it, and could not be taken back. So `damping` times the mean of
    its diagonal is added to that diagonal: such directions are kept last, not lost, and at full rank every vector comes back. The way
    there multiplies by up to `damping ** -0.5`; the loss by the undamped metric grows by no more than the damped part. A metric of
    zeros counts as the identity.

    Args:
        gram: Second moment of the vectors, (..., d, d).
        metric: Symmetric and not negative, (..., d, d).
        rank: How many coefficients to keep, 1 to d.
        damping: Relative to the mean of the metric's diagonal; above 0.

    Returns:
        A projection whose energies are the eigenvalues of `M^(1/2) gram M^(1/2)`, with the damped M: those from `rank` on are the loss.
    """
    _check_square("gram", gram)
    _check_square("metric", metric)
    _check_rank(rank, gram.shape[-1])
    if gram.shape[-1] != metric.shape[-1]:
        raise ConfigError.of("metric", f"{gram.shape[-1]} columns, as gram", tuple(metric.shape))
    if not damping > 0:
        raise ConfigError.of("damping", "a number above 0", damping)
    root, inverse = roots(metric, damping)
    best = principal(root @ gram.double() @ root, rank)
    return Projection(best.encode @ root, inverse @ best.decode, best.energies)


def roots(metric: torch.Tensor, damping: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """M^(1/2), and its inverse, of a damped metric M, as in `in_metric`; (..., d, d) each, in float64.

    Args:
        metric: Symmetric and not negative, (..., d, d).
        damping: Relative to the mean of the metric's diagonal; above 0.
    """
    weights, axes = _descending(metric)
    weights = weights.clamp_min(0.0)
    mean = weights.mean(-1, keepdim=True)
    weights = torch.where(mean > 0, weights + damping * mean, torch.ones_like(weights))
    return axes.mT @ (weights.sqrt().unsqueeze(-1) * axes), axes.mT @ (weights.rsqrt().unsqueeze(-1) * axes)


def packed(symmetric: torch.Tensor) -> torch.Tensor:
    """One half of symmetric matrices, (..., d (d + 1) / 2).

    Args:
        symmetric: (..., d, d).
    """
    rows, columns = torch.tril_indices(symmetric.shape[-1], symmetric.shape[-1], device=symmetric.device)
    return symmetric[..., rows, columns]


def unpacked(half: torch.Tensor) -> torch.Tensor:
    """The matrices of which `packed` gave one half, (..., d, d).

    Args:
        half: (..., d (d + 1) / 2).
    """
    dim = int((2 * half.shape[-1]) ** 0.5)
    rows, columns = torch.tril_indices(dim, dim, device=half.device)
    place = torch.empty(dim, dim, dtype=torch.int64, device=half.device)
    place[rows, columns] = place[columns, rows] = torch.arange(len(rows), device=half.device)
    return half[..., place]


def rank_for_energy(energies: torch.Tensor, share: float, minimum: int = 1) -> torch.Tensor:
    """The smallest rank that keeps a share of the energy, (...).

    Args:
        energies: (..., d), the largest first.
        share: Above 0 and up to 1.
        minimum: The smallest rank to give, also where there is no energy at all.
    """
    if not 0 < share <= 1:
        raise ConfigError.of("share", "a float above 0 and up to 1", share)
    sums = energies.double().clamp_min(0.0).cumsum(-1)
    return (1 + (sums < share * sums[..., -1:]).sum(-1)).clamp_min(minimum)


def allocate(
    losses: Sequence[torch.Tensor], budget: float, *, cost: float | Sequence[float], multiple_of: int = 1, minimum: int = 1
) -> list[int]:
    """Shares a budget out among heads so that little energy remains outside of their ranks.

    Steps of `multiple_of` are bought, the one with the most energy for its cost first. Energies fall, so no head has a better step behind
    a worse one: where all steps cost the same, nothing can be better. Where costs differ, the best choice of what to do with the rest of
    the budget is a hard problem, and this is at most the gain of one step away from it. Steps that gain nothing are not bought.

    Args:
        losses: For each head (and for its keys and values) the energies, the largest first, 1-D; weighted so that they can be compared.
        budget: What the sum of rank times cost may reach.
        cost: Of one rank; one number for all, or one for each of `losses`.
        multiple_of: Ranks are multiples of this, or all directions.
        minimum: The smallest rank, rounded up to such a multiple.
    """
    costs = [float(each) for each in cost] if isinstance(cost, Sequence) else [float(cost)] * len(losses)
    _check_allocation(losses, costs, multiple_of, minimum)
    sums = [[0.0, *each.double().clamp_min(0.0).cumsum(0).tolist()] for each in losses]
    ranks = [min(-(-minimum // multiple_of) * multiple_of, len(each) - 1) for each in sums]
    spent = sum(rank * each for rank, each in zip(ranks, costs, strict=True))
    if spent > budget:
        raise ConfigError.of("budget", f"at least {spent:g}, the cost of the smallest ranks", budget, "Lower minimum or multiple_of.")

    def offer(index: int) -> list[tuple[float, int, int]]:
        """The head's next step: minus its gain for its cost, the head, the rank it leads to."""
        here, there = ranks[index], min(ranks[index] + multiple_of, len(sums[index]) - 1)
        gain = sums[index][there] - sums[index][here]
        return [(-gain / (costs[index] * (there - here)), index, there)] if gain > 0 else []

    offers = [step for index in range(len(sums)) for step in offer(index)]
    heapq.heapify(offers)
    while offers:
        _, index, there = heapq.heappop(offers)
        price = (there - ranks[index]) * costs[index]
        if spent + price <= budget:
            spent += price
            ranks[index] = there
            for step in offer(index):
                heapq.heappush(offers, step)
    return ranks


def rotation_average(
    moment: torch.Tensor, geometry: RotaryGeometry, distances: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The metric for keys before rotation: a moment of queries before rotation, averaged over the angles at which they meet.

    A query `distance` tokens after a key meets it as if it had been turned that far and the key not at all, so this is the sum of
    `weight * R(distance) moment R(distance)'`. In the plane of a pair of dimensions, as complex numbers, each 2 x 2 block of the moment is
    `z -> a z + b conj(z)`; a turn on both sides multiplies a and b by one number each. So only the mean of those numbers is needed, and no
    distance is looked at twice. `attention_scaling`, which multiplies all logits alike, is left out.

    Args:
        moment: (..., d, d), of queries without rotation, in the order of the key's dimensions.
        geometry: How the model rotates.
        distances: Positions of queries minus those of the keys, 1-D integers: 0 and up for what a causal model sees.
        weights: How much each distance counts. None: 1 / n each.
    """
    dim = geometry.head_dim
    if moment.shape[-2:] != (dim, dim):
        raise ConfigError.of("moment", f"shape (..., {dim}, {dim})", tuple(moment.shape))
    if distances.ndim != 1 or not len(distances):
        raise ConfigError.of("distances", "one dimension of at least one integer", tuple(distances.shape))
    if weights is None:
        weights = torch.full(distances.shape, 1 / len(distances), dtype=torch.float64)
    elif weights.shape != distances.shape:
        raise ConfigError.of("weights", f"shape {tuple(distances.shape)}, as distances", tuple(weights.shape))
    cos, sin = geometry.cos_sin(distances, torch.float64, moment.device)
    first, second = _pairs(geometry, moment.device)
    # Dimensions that are not turned form pairs that turn by nothing; an odd one out gets a partner of zeros.
    still = torch.zeros(len(cos), len(first) - cos.shape[-1], dtype=torch.float64, device=cos.device)
    turns = torch.complex(torch.cat((cos, still + 1), -1), torch.cat((sin, still), -1))
    weighted = turns * weights.to(turns.device, torch.float64).unsqueeze(-1)
    same, opposite = weighted.mT @ turns.conj(), weighted.mT @ turns
    padded = torch.nn.functional.pad(moment.double(), (0, dim % 2, 0, dim % 2))
    rows, columns = (padded[..., first, :], padded[..., second, :]), (first, second)
    (xx, xy), (yx, yy) = ([row[..., column] for column in columns] for row in rows)
    a = torch.complex(xx + yy, yx - xy) / 2 * same
    b = torch.complex(xx - yy, yx + xy) / 2 * opposite
    turned = torch.cat(
        (torch.cat(((a + b).real, (b - a).imag), -1), torch.cat(((a + b).imag, (a - b).real), -1)),
        -2,
    )
    order = torch.cat((first, second)).argsort()[:dim]
    return turned[..., order, :][..., order]


def _pairs(geometry: RotaryGeometry, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The dimensions of each pair, those that are not turned at the end; an odd number of dimensions is made even."""
    half, even = geometry.rotary_dim // 2, geometry.head_dim + geometry.head_dim % 2
    turned = torch.arange(2 * half, device=device)
    turned = turned.view(half, 2).mT if geometry.layout == "interleaved" else turned.view(2, half)
    rest = torch.arange(2 * half, even, device=device).view(-1, 2).mT
    first, second = torch.cat((turned, rest), dim=-1)
    return first, second


def _descending(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, the largest first, and eigenvectors as rows, in float64."""
    symmetric = symmetric.double()
    values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
    return values.flip(-1), vectors.flip(-1).mT


def _check_square(argument: str, matrix: torch.Tensor) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ConfigError.of(argument, "shape (..., d, d)", tuple(matrix.shape))


def _check_rank(rank: int, dim: int) -> None:
    whole_number("rank", rank, 1, f"an integer of 1 to {dim}", most=dim)


def _check_allocation(losses: Sequence[torch.Tensor], costs: list[float], multiple_of: int, minimum: int) -> None:
    if len(costs) != len(losses):
        raise ConfigError.of("cost", f"one number, or one for each of {len(losses)} losses", f"{len(costs)} numbers")
    if not all(each > 0 for each in costs):
        raise ConfigError.of("cost", "numbers above 0", costs)
    for name, value, least in (("multiple_of", multiple_of, 1), ("minimum", minimum, 0)):
        whole_number(name, value, least)
    for index, each in enumerate(losses):
        if each.ndim != 1 or bool((each.diff() > 0).any()):
            raise ConfigError.of(f"losses[{index}]", "one dimension of energies, the largest first", each)
