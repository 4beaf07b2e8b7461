"""Ridge regression from second moments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_kvcaches.errors import ConfigError

# A pivot of the Cholesky factor below this share of the largest may be rounding, and its column of the solution noise.
_SMALLEST_PIVOT = 1e-5
# An eigenvalue below this share of the largest, times the number of inputs, is rounding.
_SMALLEST_EIGENVALUE = 1e-14


def fit_ridge(xx: Tensor, xy: Tensor, lam: float) -> Tensor:
    """The ridge regression from second moments: W of shape (inputs, outputs), in float64, for which `x @ W` is nearest to y.

    Inputs that depend on each other are fine with any `lam`: directions in which there is nothing but rounding get no weight.

    Args:
        xx: `x.T @ x`, (inputs, inputs); a sum or a mean over rows.
        xy: `x.T @ y`, (inputs, outputs), over the same rows.
        lam: Strength as a share of the mean diagonal of `xx`, so that it means the same for any scale and number of rows.
    """
    if xx.ndim != 2 or xx.shape[0] != xx.shape[1] or not len(xx):
        raise ConfigError.of("xx", "a square matrix", tuple(xx.shape))
    if xy.ndim != 2 or len(xy) != len(xx):
        raise ConfigError.of("xy", f"a matrix of {len(xx)} rows, as xx has", tuple(xy.shape))
    if not (math.isfinite(lam) and lam >= 0):
        raise ConfigError.of("lam", "a finite number of at least 0", lam)
    for name, moments in (("xx", xx), ("xy", xy)):
        if not bool(moments.isfinite().all()):
            raise ConfigError.of(name, "finite moments", "infinities or NaN")
    left, right = xx.double(), xy.double()
    left = (left + left.T) / 2
    left.diagonal().add_(lam * float(left.diagonal().mean()))
    factor, failed = torch.linalg.cholesky_ex(left)
    pivots = factor.diagonal()
    if not int(failed) and float(pivots.min()) > _SMALLEST_PIVOT * float(pivots.max()):
        return torch.cholesky_solve(right, factor)
    values, vectors = torch.linalg.eigh(left)
    kept = values > max(float(values[-1]) * _SMALLEST_EIGENVALUE * len(left), 0.0)
    return vectors[:, kept] @ ((vectors[:, kept].T @ right) / values[kept, None])
