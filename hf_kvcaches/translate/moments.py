"""Second moments of what both models make of the same tokens: all that fits are made of.

No trace is kept. For each layer there is one symmetric matrix over [1, side, producer, consumer], to which every prompt adds; a fit solves
on its blocks. The sums are in float64, and on a CPU each prompt's share is, too.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.core.rope import RotaryGeometry

# Keys of a prompt from where its queries are looked at, as shares of its length.
_FROM = (0.0, 0.25, 0.5, 0.75)


class Moments:
    """Sums of products of a few blocks of columns.

    Args:
        widths: Of the blocks, in order.
        device: Where sums are kept.

    Attributes:
        kind: What products are taken in. Accelerators are slow in float64.
        rounding: What is below this share of a variance is made of rounding.
    """

    def __init__(self, widths: dict[str, int], device: torch.device | str = "cpu") -> None:
        exact = torch.device(device).type == "cpu"
        self.kind, self.rounding = (torch.float64, 1e-12) if exact else (torch.float32, 1e-6)
        stops = torch.tensor(list(widths.values())).cumsum(0).tolist()
        self.places = {name: slice(stop - width, stop) for (name, width), stop in zip(widths.items(), stops, strict=True)}
        self.sums = torch.zeros(stops[-1], stops[-1], dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, **blocks: torch.Tensor) -> None:
        """Counts tokens in.

        Args:
            **blocks: By name, each (tokens, width).
        """
        assert set(blocks) == set(self.places), (set(blocks), set(self.places))
        columns = torch.cat([blocks[name].to(self.sums.device, self.kind) for name in self.places], dim=1)
        # Products of differences from a row near all of them: of states far from 0, float32 would keep little but the distance.
        near = columns.mean(0)
        columns = columns - near
        near, left = near.double(), columns.sum(0, dtype=torch.float64)
        self.sums += (columns.T @ columns).double()
        self.sums.addr_(near, left + len(columns) * near).addr_(left, near)
        self.count += len(columns)

    def of(self, first: str, second: str) -> torch.Tensor:
        """The mean products of two blocks, (width, width).

        Args:
            first: Its columns are the rows here.
            second: Its columns are the columns here.
        """
        return self.sums[self.places[first], self.places[second]] / self.count


class QueryMoments:
    """What a layer's queries say about its keys: their second moments as keys without rotation meet them, (heads, key_dim, key_dim).

    A query at place i meets a key at place j turned back by j. Which j stand for all is a choice: the beginning of a prompt and its
    quarters.

    Args:
        geometry: How the layer's keys are turned.
    """

    def __init__(self, geometry: RotaryGeometry) -> None:
        self.geometry = geometry
        self.sums: torch.Tensor | None = None
        self.count = torch.zeros((), dtype=torch.float64)
        self.scaling = 1.0

    def add(self, module: Any, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        """Counts the queries of a prompt in.

        Args:
            module: The attention module.
            query: Rotated, (1, heads, tokens, key_dim).
            arguments: What the attention was given besides.
        """
        scaling = arguments.get("scaling")
        self.scaling = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
        tokens = query.shape[2]
        for share in _FROM:
            place = int(share * tokens)
            met = query[:, :, place:]
            if self.geometry.kind == "rope":
                # What scales rotated keys makes them count for more, and turning back scales the other way.
                met = self.geometry.unrotate(met, place) * self.geometry.attention_scaling**2
            met = met[0].float()
            products = (met.transpose(1, 2) @ met / met.shape[1]).double().cpu()
            self.sums = products if self.sums is None else self.sums + products
            self.count += 1

    def mean(self) -> torch.Tensor:
        """(heads, key_dim, key_dim), the attention's scaling included."""
        assert self.sums is not None
        return self.sums / self.count * self.scaling**2
