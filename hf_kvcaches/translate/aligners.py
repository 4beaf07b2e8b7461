"""Maps from codes, and what the consumer knows for nothing, to its own normalised input of a layer's attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_kvcaches.errors import ArtifactError, ConfigError, whole_number

# A pivot of the Cholesky factor below this share of the largest may be rounding, and its column of the solution noise.
_SMALLEST_PIVOT = 1e-5
# An eigenvalue below this share of the largest, times the number of inputs, is rounding.
_SMALLEST_EIGENVALUE = 1e-14

# Pairs of rows, (n, inputs) and (n, outputs) floating-point, by number: a list, or a data set that reads them from disk.
Batches = Sequence[tuple[Tensor, Tensor]]


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


class MLPAligner(nn.Module):
    """A linear map and a hidden layer beside it: `x @ weight + bias + scale * outer(gelu(inner((x - centre) / spread)))`.

    "Semantic Cache Distillation", equation 11. **Departs from the paper**, whose aligner is an MLP alone: the linear path is a ridge
    solution that is already there, and `outer` starts at 0, so that an untrained aligner is exactly the ridge regression.

    Args:
        weight: (inputs, outputs), such as `fit_ridge` gives; stored in float32.
        bias: (outputs,), or None for 0.
    """

    weight: Tensor
    bias: Tensor
    centre: Tensor
    spread: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, hidden: int, seed: int = 0) -> None:
        super().__init__()
        if weight.ndim != 2 or 0 in weight.shape:
            raise ConfigError.of("weight", "a matrix (inputs, outputs)", tuple(weight.shape))
        inputs, outputs = weight.shape
        if bias is not None and tuple(bias.shape) != (outputs,):
            raise ConfigError.of("bias", f"a vector of {outputs}, as weight has columns", tuple(bias.shape))
        hidden = whole_number("hidden", hidden, 1)
        linear = weight.detach().to(torch.float32, copy=True)
        self.register_buffer("weight", linear)
        self.register_buffer("bias", torch.zeros_like(linear[0]) if bias is None else bias.detach().to(linear, copy=True))
        # What makes inputs and outputs of the hidden path about as large as 1; the training sets them.
        self.register_buffer("centre", torch.zeros_like(linear[:, 0]))
        self.register_buffer("spread", torch.ones_like(linear[:, 0]))
        self.register_buffer("scale", torch.ones_like(linear[0, 0]))
        generator = torch.Generator().manual_seed(seed)
        self.inner = nn.Linear(inputs, hidden)
        self.outer = nn.Linear(hidden, outputs, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(torch.randn(hidden, inputs, generator=generator) / inputs**0.5)
            self.inner.bias.zero_()
            self.outer.weight.zero_()
        self.inner.to(linear.device)
        self.outer.to(linear.device)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> MLPAligner:
        """An aligner as `state_dict` gave it."""
        hidden, inputs = state["inner.weight"].shape
        # Before room is made for both together.
        if inputs != len(state["weight"]):
            raise ArtifactError(f"An aligner is stored with {len(state['weight'])} inputs and hidden ones of {inputs}. Train it anew.")
        made = cls(state["weight"], state["bias"], hidden=hidden)
        made.load_state_dict(dict(state))
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return x @ self.weight + self.bias + self.scale * self.outer(functional.gelu(self.inner(self.standard(x))))

    def standard(self, x: Tensor) -> Tensor:
        """The inputs as the hidden layer sees them."""
        return (x - self.centre) / self.spread


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Args:
        start: Mean squared error on held-out rows before it, as a share of the targets' mean square.
        best: The same of the aligner that was kept; never above `start`.
        best_step: The step after which that was; 0 where nothing was better than the start.
    """

    start: float
    best: float
    best_step: int
    steps: int


@dataclass(frozen=True)
class _Settings:
    """The arguments of a training, and the sizes of what is trained."""

    steps: int
    lr: float
    seed: int
    every: int
    rows: int
    held_out: float
    weight_decay: float
    inputs: int
    outputs: int

    def check(self) -> None:
        """Refuses what the caller got wrong."""
        for name in ("steps", "every", "rows"):
            whole_number(name, getattr(self, name), 1)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError.of("lr", "a finite number above 0", self.lr)
        if not 0 < self.held_out < 1:
            raise ConfigError.of("held_out", "a share above 0 and below 1", self.held_out)
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError.of("weight_decay", "a finite number of at least 0", self.weight_decay)


def train_aligner(
    aligner: MLPAligner,
    batches: Batches,
    *,
    steps: int,
    lr: float = 1e-3,
    seed: int = 0,
    every: int = 100,
    rows: int = 512,
    held_out: float = 0.1,
    weight_decay: float = 0.01,
) -> Trained:
    """Trains an aligner in place to the least squared error, and leaves it as it was best on rows kept apart.

    AdamW with a cosine schedule; a step takes some rows of one batch. The last share of each batch's rows is kept apart, all in one
    stretch, because neighbouring tokens resemble each other.

    Args:
        aligner: Untrained: its weight and bias are the start, which the result is never worse than on the rows kept apart.
        batches: Pairs of rows by number: `len(batches)` and `batches[i]`, each time the same. Read one at a time.
        rows: At most so many of a batch in one step.
        held_out: Share of rows kept apart.
    """
    inputs, outputs = aligner.weight.shape
    settings = _Settings(steps, lr, seed, every, rows, held_out, weight_decay, inputs, outputs)
    settings.check()
    if bool(aligner.outer.weight.any()):
        raise ConfigError.of("aligner", "an untrained one", "one whose hidden layer is trained", "Make a new one from its weight and bias.")
    training = _Training(aligner, batches, settings)
    training.look()
    while training.step < steps:
        training.advance()
        if training.step % every == 0 or training.step == steps:
            training.look()
    return training.finish()


def _lengths(batches: Batches, settings: _Settings) -> list[int]:
    """How many rows each batch has."""
    lengths = []
    for index in range(len(batches)):
        x, y = batches[index]
        if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or (x.shape[1], y.shape[1]) != (settings.inputs, settings.outputs):
            expected = f"rows (n, {settings.inputs}) and as many rows (n, {settings.outputs})"
            raise ConfigError.of(f"batches[{index}]", expected, (tuple(x.shape), tuple(y.shape)))
        lengths.append(len(x))
    return lengths


class _Training:
    """One run. `shift` corrects the linear path, in standard units so that one learning rate fits all; `finish` folds it in."""

    def __init__(self, aligner: MLPAligner, batches: Batches, settings: _Settings) -> None:
        self.aligner, self.batches, self.settings = aligner, batches, settings
        self.step, self.best, self.best_step, self.start = 0, math.inf, 0, math.inf
        self.device = aligner.weight.device
        lengths = _lengths(batches, settings)
        # Where the batches' rows that are kept apart begin.
        self._splits = [length - round(settings.held_out * length) for length in lengths]
        self._usable = [index for index, split in enumerate(self._splits) if split]
        if not self._usable or self._splits == lengths:
            raise ConfigError.of("batches", "rows to train on and rows to keep apart", f"batches of {lengths} rows", "Pass longer batches.")
        self._measure()
        shift = torch.zeros(settings.inputs + 1, settings.outputs, device=self.device)
        self.trained: dict[str, Tensor] = {"shift": nn.Parameter(shift), **dict(aligner.named_parameters())}
        self.kept = {name: value.detach().clone() for name, value in self.trained.items()}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=settings.lr, weight_decay=settings.weight_decay)
        self.generator = torch.Generator().manual_seed(settings.seed)

    def _batch(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.batches[index]
        return x.to(self.device, torch.float32), y.to(self.device, torch.float32)

    def _measure(self) -> None:
        """Sets the aligner's units from the rows that are trained on."""
        total = torch.zeros(self.settings.inputs, dtype=torch.float64, device=self.device)
        squares, square, count = torch.zeros_like(total), 0.0, 0
        for index in self._usable:
            x, y = (part[: self._splits[index]].double() for part in self._batch(index))
            total, squares = total + x.sum(0), squares + x.square().sum(0)
            square, count = square + float(y.square().sum()), count + len(x)
        centre, rms = total / count, (square / (count * self.settings.outputs)) ** 0.5
        spread = (squares / count - centre.square()).clamp_min(0).sqrt()
        if not (math.isfinite(rms) and bool(spread.isfinite().all())):
            raise ConfigError.of("batches", "finite values", "infinities or NaN")
        # An input that hardly varies, such as a column of ones, would have a unit of rounding errors.
        spread = torch.maximum(spread, 1e-3 * centre.abs())
        spread = torch.where(spread > 0, spread, torch.ones_like(spread))
        self.aligner.centre.copy_(centre)
        self.aligner.spread.copy_(spread)
        self.aligner.scale.fill_(rms or 1.0)

    def _output(self, x: Tensor) -> Tensor:
        shift = self.trained["shift"]
        out: Tensor = self.aligner(x) + self.aligner.scale * (self.aligner.standard(x) @ shift[:-1] + shift[-1])
        return out

    @torch.enable_grad()
    def advance(self) -> None:
        """One step."""
        settings = self.settings
        index = self._usable[int(torch.randint(len(self._usable), (), generator=self.generator))]
        order = torch.randperm(self._splits[index], generator=self.generator)[: settings.rows].to(self.device)
        x, y = self._batch(index)
        loss = ((self._output(x[order]) - y[order]) / self.aligner.scale).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr * (1 + math.cos(math.pi * self.step / settings.steps)) / 2
        self.optimizer.step()
        self.step += 1

    @torch.no_grad()
    def look(self) -> None:
        """Measures on the rows kept apart, and keeps what is best."""
        wrong, square = 0.0, 0.0
        for index, split in enumerate(self._splits):
            x, y = (part[split:] for part in self._batch(index))
            wrong += float((self._output(x) - y).double().square().sum())
            square += float(y.double().square().sum())
        error = wrong / square if square else wrong
        if self.step == 0:
            if not math.isfinite(error):
                raise ConfigError.of("batches", "finite values", "infinities or NaN")
            self.start = self.best = error
        elif error < self.best:
            self.best, self.best_step = error, self.step
            self.kept = {name: value.detach().clone() for name, value in self.trained.items()}

    @torch.no_grad()
    def finish(self) -> Trained:
        """Puts the best into the aligner."""
        aligner = self.aligner
        for name, parameter in aligner.named_parameters():
            parameter.copy_(self.kept[name])
        shift = self.kept["shift"].double()
        weight = aligner.scale * shift[:-1] / aligner.spread[:, None]
        if bool(shift.any()):
            aligner.bias.copy_(aligner.bias + aligner.scale * shift[-1] - aligner.centre.double() @ weight)
            aligner.weight.copy_(aligner.weight + weight)
        return Trained(self.start, self.best, self.best_step, self.step)
