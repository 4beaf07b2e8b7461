"""From measured moments to a side's transform and quantisers.

With C the covariance of a head's vectors and M the metric of their errors, the directions are the eigenvectors of `M^(1/2) C M^(1/2)`, and
a vector x has the coefficients `V M^(1/2) (x - mean)`: an error of them costs the same in every direction, head and layer.
"""

from __future__ import annotations

import torch

from hf_kvcaches.codec.calibrate import LayerSums
from hf_kvcaches.codec.joint import SAMPLED, JointBasis
from hf_kvcaches.codec.metric import Metric
from hf_kvcaches.codec.moments import descending, roots
from hf_kvcaches.codec.sides import WIDTHS, CalibratedLayer, CalibratedSide

# A direction in which no gradient was seen costs at least this share of the mean.
_DAMPING = 0.02
# Of a head's mean square.
_LEAST_VARIANCE = 1e-12
# The step of a uniform quantiser that loses least of a normal distribution, in standard deviations.
_NORMAL_STEPS = {1: 1.596, 2: 0.9957, 3: 0.586, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}
# The squared error of those that clip, as a share of the variance.
_NORMAL_LOSSES = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154, 5: 0.003495}
# What it is multiplied with for distributions with heavier or lighter tails.
_MULTIPLES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
# These need no choice: they reach 32 and 16 standard deviations of the direction, or of the head in the mean where that is more, so that
# directions which the texts hardly use are not clipped either. Steps are of about float16's precision and of float32's.
_WIDE_STEPS = {16: 2.0**-10, 24: 2.0**-19}
# From so many bits on, steps reach all of the sample: that costs little, and a clipped coefficient costs much.
_REACHING = 6
# A direction that the texts do not use is taken to have this share of the head's mean deviation.
_LEAST_DEVIATION = 1e-4
_TINY = 1e-30


def joint_basis(sums: LayerSums, metric: Metric) -> JointBasis:
    """The basis of keys and values of all heads of a layer together, or of groups of heads."""
    shape, sides = sums.shape, costs(sums, metric)
    groups = []
    for group, covariance in enumerate(sums.covariance):
        heads = slice(group * shape.group, (group + 1) * shape.group)
        root = torch.block_diag(*(roots(cost, _DAMPING)[0] for side in sides for cost in side[heads]))
        _, directions = descending(root @ covariance @ root)
        groups.append(directions @ root)
    encode = torch.stack(groups)
    tokens = sums.sample[:SAMPLED].transpose(0, 1).double() - sums.mean[:, None]
    coefficients = (tokens @ encode.mT).transpose(0, 1).flatten(1)
    deviations = coefficients.square().mean(0).sqrt().clamp_min(_TINY)
    tensors = (sums.mean.float(), encode.float(), deviations.float(), (coefficients / deviations).half())
    return JointBasis(shape, *(tensor.cpu().contiguous() for tensor in tensors))


def costs(sums: LayerSums, metric: Metric) -> tuple[torch.Tensor, torch.Tensor]:
    """The metrics of errors of keys and of values, (heads, dim, dim) each; they compare over heads, layers and sides.

    With "loss" they are twice the divergence of a prediction. With "plain" all heads vary alike.
    """
    if metric == "loss":
        return sums.keys.mean, sums.values.mean
    found = []
    for covariance, moment in zip(_blocks(sums, sums.covariance), _blocks(sums, sums.states.mean), strict=True):
        spread, size = (each.diagonal(dim1=-2, dim2=-1).sum(-1) for each in (covariance, moment))
        # What is less than rounding of the vectors is no variance.
        weight = torch.where(spread > _LEAST_VARIANCE * size, 1 / spread, 0.0)
        found.append(torch.diag_embed(weight[:, None].expand(-1, covariance.shape[-1])))
    return found[0], found[1]


def fit_layer(sums: LayerSums, metric: Metric) -> CalibratedLayer:
    """The transforms and quantisers of keys and of values, for each head by itself; all widths are 0 so far."""
    means = sums.shape.split(sums.mean[:, None])
    tokens = sums.shape.split(sums.sample.transpose(0, 1))
    sides = zip(means, _blocks(sums, sums.covariance), tokens, costs(sums, metric), strict=True)
    keys, values = (_fit(mean[:, 0], covariance, states, cost) for mean, covariance, states, cost in sides)
    return CalibratedLayer(keys, values)


def _blocks(sums: LayerSums, moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of single heads on the diagonal of a moment, of keys and of values, (heads, dim, dim) each."""
    group, sizes, start, found = sums.shape.group, sums.shape[1:], 0, []
    for size in sizes:
        stop = start + group * size
        own = moment[:, start:stop, start:stop].unflatten(2, (group, size)).unflatten(1, (group, size))
        found.append(own.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1))
        start = stop
    return found[0], found[1]


def _fit(mean: torch.Tensor, covariance: torch.Tensor, states: torch.Tensor, cost: torch.Tensor) -> CalibratedSide:
    """The transform of one side, with steps and distortions measured on the sample.

    Args:
        mean: (kv_heads, d), and `covariance`, (kv_heads, d, d).
        states: Of the sample, (kv_heads, tokens, d).
        cost: The metric of errors, (kv_heads, d, d).
    """
    # With a metric of mean 1 the coefficients are about as large as the vectors' elements.
    size = cost.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(torch.finfo(torch.float64).tiny)
    root, _ = roots(cost / size)
    _, directions = descending(root @ covariance @ root)
    encode = directions @ root
    coefficients = (states.double() - mean[:, None]) @ encode.mT
    steps, distortions = quantizers(coefficients.float())
    tensors = (mean, encode, distortions[..., 0], _tails(coefficients), steps, distortions * size)
    mean, encode, energies, tails, steps, distortions = (each.to("cpu", torch.float32).contiguous() for each in tensors)
    return CalibratedSide(mean, encode, energies, tails, steps, distortions, torch.zeros(mean.shape, dtype=torch.uint8))


def unmeasured(heads: int, dim: int) -> CalibratedSide:
    """A side of which nothing is known: vectors are their own coefficients, and steps are those of normal distributions with energy 1."""
    mean, ones = torch.zeros(heads, dim), torch.ones(heads, dim)
    # Twice as wide, they clip nothing any more, and lose what is uniform in a step.
    sizes = _NORMAL_STEPS | {width: 2 * step for width, step in _NORMAL_STEPS.items() if width >= _REACHING} | _WIDE_STEPS
    steps = torch.tensor([sizes[width] for width in WIDTHS])
    lost = torch.tensor([1.0, *(_NORMAL_LOSSES.get(width, sizes[width] ** 2 / 12) for width in WIDTHS)])
    whole = torch.eye(dim).repeat(heads, 1, 1)
    tails = torch.zeros(heads, 1 + dim)
    return CalibratedSide(mean, whole, ones, tails, steps.expand(heads, dim, -1), lost.expand(heads, dim, -1), mean.to(torch.uint8))


def _tails(coefficients: torch.Tensor) -> torch.Tensor:
    """See `CalibratedSide.tails`; of the sample, (heads, tokens, d)."""
    energies = coefficients.square()
    behind = torch.nn.functional.pad(energies.flip(-1).cumsum(-1).flip(-1), (0, 1))
    shares = behind / behind[..., :1].clamp_min(_TINY)
    return shares.kthvalue(-(-shares.shape[1] * 19 // 20), 1).values


def quantizers(
    coefficients: torch.Tensor, reaching: int = _REACHING, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each direction and width the step with the smallest squared error, (heads, d, widths), and the errors, those of width 0 first.

    Args:
        coefficients: Of the sample, (heads, tokens, d).
        reaching: From so many bits on, no coefficient of the sample is clipped.
        weights: By which errors of each token count, (tokens,); None for 1.
    """
    counts = coefficients.new_ones(coefficients.shape[1], 1) if weights is None else weights[:, None]
    energies = (coefficients.square() * counts).mean(1)
    of_head = energies.mean(-1, keepdim=True).sqrt().clamp_min(_TINY)
    deviations = energies.sqrt().maximum(_LEAST_DEVIATION * of_head)
    largest = coefficients.abs().amax(1)
    steps, distortions = [], [energies]
    for width in WIDTHS:
        top = 2 ** (width - 1) - 0.5
        best_error, best_step = torch.full_like(deviations, torch.inf), deviations
        if width in _WIDE_STEPS:
            candidates = [_WIDE_STEPS[width] * deviations.maximum(of_head)]
        else:
            candidates = [_NORMAL_STEPS[width] * multiple * deviations for multiple in _MULTIPLES]
        for candidate in candidates:
            step = candidate.maximum(largest / top) if width >= reaching else candidate
            levels = ((coefficients / step[:, None]).floor() + 0.5).clamp(-top, top)
            error = ((levels * step[:, None] - coefficients).square() * counts).mean(1)
            better = error < best_error
            best_error, best_step = torch.where(better, error, best_error), torch.where(better, step, best_step)
        steps.append(best_step)
        distortions.append(best_error)
    return torch.stack(steps, -1), torch.stack(distortions, -1)
