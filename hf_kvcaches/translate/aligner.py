"""The aligner of a patched layer as an MLP: from codes, and what the consumer knows, to its attention's normalised input."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_kvcaches.errors import ArtifactError

# The share of the rows that is held out, after how many steps the error on them is measured, and the rows of a step.
_HELD_OUT, _EVALUATE_AFTER, _BATCH = 0.1, 100, 512


class MLPAligner(nn.Module):
    """A linear map and a hidden layer beside it: `x @ weight + bias + scale * outer(gelu(inner((x - centre) / spread)))`.

    "Semantic Cache Distillation", equation 11. **Departs from the paper**, whose aligner is an MLP alone: the linear path is a ridge
    solution, and `outer` starts at 0, so that an untrained aligner is exactly the ridge regression.

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
        inputs, outputs = weight.shape
        linear = weight.detach().to(torch.float32, copy=True)
        self.register_buffer("weight", linear)
        self.register_buffer("bias", torch.zeros_like(linear[0]) if bias is None else bias.detach().to(linear, copy=True))
        # The units in which inputs and outputs of the hidden path are about as large as 1; the training sets them.
        self.register_buffer("centre", torch.zeros_like(linear[:, 0]))
        self.register_buffer("spread", torch.ones_like(linear[:, 0]))
        self.register_buffer("scale", torch.ones_like(linear[0, 0]))
        self.inner, self.outer = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(torch.randn(hidden, inputs, generator=torch.Generator().manual_seed(seed)) / inputs**0.5)
            self.inner.bias.zero_()
            self.outer.weight.zero_()
        self.to(linear.device)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> MLPAligner:
        """Restore an aligner from its `state_dict`."""
        hidden, inputs = state["inner.weight"].shape
        # Checked before both together allocate memory.
        if inputs != len(state["weight"]):
            raise ArtifactError(f"An aligner is stored with {len(state['weight'])} inputs and hidden ones of {inputs}. Train it anew.")
        aligner = cls(state["weight"], state["bias"], hidden=hidden)
        aligner.load_state_dict(dict(state))
        return aligner

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        hidden = functional.gelu(self.inner((x - self.centre) / self.spread))
        return x @ self.weight + self.bias + self.scale * self.outer(hidden)

    def set_units(self, x: Tensor, y: Tensor) -> None:
        """Scale inputs and outputs of the hidden layer to about 1."""
        spread, centre = torch.std_mean(x.double(), dim=0, correction=0)
        # An input that hardly varies, such as a column of ones, would have a unit of rounding errors.
        spread = torch.maximum(spread, 1e-3 * centre.abs())
        self.centre.copy_(centre)
        self.spread.copy_(torch.where(spread > 0, spread, torch.ones_like(spread)))
        self.scale.fill_(float(y.double().square().mean().sqrt()) or 1.0)


@torch.enable_grad()
def train_aligner(aligner: MLPAligner, x: Tensor, y: Tensor, *, steps: int, lr: float = 1e-3) -> None:
    """Train the hidden layer in place by AdamW with a cosine schedule, and keep the weights with the least error on held-out rows.

    The held-out rows are the last tenth, in one stretch, as neighbouring tokens resemble each other. On them the result is never worse than
    the ridge regression.

    Args:
        aligner: Untrained.
        x: (rows, inputs).
        y: (rows, outputs).
    """
    split = min(len(x) - 1, round((1 - _HELD_OUT) * len(x)))
    aligner.set_units(x[:split], y[:split])
    optimizer = torch.optim.AdamW(aligner.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)

    def error() -> float:
        with torch.no_grad():
            return float((aligner(x[split:]) - y[split:]).double().square().sum())

    least, best = error(), copy.deepcopy(aligner.state_dict())
    for step in range(1, steps + 1):
        rows = torch.randint(split, (min(_BATCH, split),), generator=generator).to(x.device)
        loss = ((aligner(x[rows]) - y[rows]) / aligner.scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step % _EVALUATE_AFTER == 0 or step == steps) and (now := error()) < least:
            least, best = now, copy.deepcopy(aligner.state_dict())
    aligner.load_state_dict(best)
