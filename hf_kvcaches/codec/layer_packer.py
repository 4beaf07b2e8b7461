"""What packs one layer on a device: between its keys and values, their coefficients in steps, its symbols and what symbols stand for."""

from __future__ import annotations

import torch

from hf_kvcaches.codec.basis import Basis
from hf_kvcaches.codec.entropy import ESCAPE, LARGEST, SIZES, SYMBOLS, TILE, Tables, is_escape, levels_of, side_of
from hf_kvcaches.codec.packing import DAMAGED
from hf_kvcaches.codec.plan import TABLES, Plan, token_levels, token_weights
from hf_kvcaches.codec.rates import rounded
from hf_kvcaches.codec.shape import States
from hf_kvcaches.errors import ArtifactError


class LayerPacker:
    """One layer on a device. The integers are in the order of `Plan.ranks`; digits are the low bits and then the integers.

    Args:
        deviations: Of the coefficients of all directions.
        step: Of all coefficients.
    """

    def __init__(self, basis: Basis, deviations: torch.Tensor, plan: Plan, step: float, tables: Tables) -> None:
        device, split, size = tables.shifts.device, plan.split, basis.shape.size
        self.plan, self.tables, self.shape = plan, tables, basis.shape
        of_integers = plan.order[plan.ranks]
        of_digits = torch.cat([plan.order[:split], of_integers])
        # Integers without their low bits count as many steps more.
        scales = torch.cat([torch.ones(split), 2.0**plan.low_bits, torch.ones(len(of_integers) - split)]).double() * step
        self._encode, self._decode, self._integers, self._digits = [], [], [], []
        for group, (mean, transform, inverse) in enumerate(zip(basis.mean.double(), basis.transform, basis.inverse, strict=True)):
            integers, digits = ((own // size == group).nonzero()[:, 0] for own in (of_integers, of_digits))
            rows = transform[of_integers[integers] % size] / step
            columns = inverse[:, of_digits[digits] % size] * scales[digits]
            self._encode.append(((-rows @ mean)[:, None].float().to(device), rows.float().to(device)))
            self._decode.append((mean.float().to(device), columns.T.float().contiguous().to(device)))
            self._integers.append(integers.to(device))
            self._digits.append(digits.to(device))
        self._weights = token_weights(deviations[plan.order] / step)[plan.ranks].to(device)
        self._low_bits, self.symbols = plan.low_bits.to(device), plan.symbols.to(device)
        table, follows, plain, count, first, stride = self.symbols.T
        self._centers = tables.boxes[1].index_select(0, table)[:, None]
        # Where the values of a symbol's table begin, and those of the next table, for all but the first symbol.
        self._values = ((table + plain * TABLES) * SYMBOLS)[1:, None], (follows * SYMBOLS)[1:, None]
        digit = torch.arange(4, device=device)
        self._digits_of = torch.where(digit < count[:, None], first[:, None] + stride[:, None] * digit, -1)

    def coefficients(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """In steps, (integers, tokens)."""
        vectors = self.shape.join(keys, values, torch.float32)
        parts = [torch.addmm(offset, rows, own.T) for (offset, rows), own in zip(self._encode, vectors, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, torch.cat(self._integers).argsort())

    def states(self, digits: torch.Tensor) -> States:
        """Keys and values, float32, of what digits stand for, (digits, tokens)."""
        parts = [digits] if len(self._decode) == 1 else [digits.index_select(0, own) for own in self._digits]
        return self.shape.split(
            torch.stack([torch.addmm(mean, own.T, rows) for (mean, rows), own in zip(self._decode, parts, strict=True)])
        )

    def intervals(self, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The intervals of all symbols, (symbols, tokens), the integers that have none, and how many of these each tile has.

        Args:
            coefficients: In steps, (integers, tokens), of whole tiles.
        """
        plan, (boxes, _) = self.plan, self.tables.boxes
        levels = token_levels(self._weights @ coefficients.square())
        integers, low = rounded(coefficients, self._low_bits)
        fixed, *centers = self._centers.split([1 + plan.split, *plan.counts])
        index = [torch.cat([levels[None], low.int()]).add_(fixed)]
        for size, own, center in zip(SIZES, integers.split(plan.lengths), centers, strict=True):
            box, *others = own.clamp(-LARGEST[size] - 1, LARGEST[size] + 1).view(size, len(center), own.shape[1])
            for other in others:
                box = (box * side_of(size)).add_(other)
            index.append((levels * side_of(size) ** size + center).add_(box))
        intervals = boxes.index_select(0, torch.cat(index).flatten()).view(-1, len(levels))
        # Few symbols have groups without an interval among so few tokens, and comparing all numbers takes long.
        escaping = 1 + plan.split + is_escape(intervals[1 + plan.split :].amin(1)).nonzero()[:, 0]
        tile, digit, token = self._escaped(is_escape(intervals[escaping]), escaping)
        return intervals, integers[digit - plan.split, token], torch.bincount(tile, minlength=len(levels) // TILE)

    def digits(self, symbols: torch.Tensor, escaped: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What symbols stand for, (digits, tokens), float32.

        Args:
            symbols: (symbols, tokens), uint8, of whole tiles.
            escaped: The integers that have no symbol.
            counts: How many of these each tile has, on the CPU.
        """
        plan, (tables, follows) = self.plan, self._values
        index = torch.addcmul(tables, follows, levels_of(symbols[0])).add_(symbols[1:])
        digits = torch.empty(plan.digits, index.shape[1], device=index.device)
        start, (ones, *others) = 0, plan.counts
        for size, own in zip(SIZES, index.split([plan.split + ones, *others]), strict=True):
            for values in self.tables.values[:size]:
                torch.index_select(values, 0, own.flatten(), out=digits[start : start + len(own)].view(-1))
                start += len(own)
        escaping = (symbols.amin(1) == ESCAPE).nonzero()[:, 0]
        tile, digit, token = self._escaped(symbols[escaping] == ESCAPE, escaping)
        if not torch.equal(torch.bincount(tile, minlength=len(counts)).cpu(), counts.long()):
            raise ArtifactError(DAMAGED)
        digits[digit, token] = escaped.float()
        return digits

    def _escaped(self, mask: torch.Tensor, symbols: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile, the digit and the token of each integer of escaped groups, in the order in which they are stored.

        Args:
            mask: Whether a group is escaped, (symbols, tokens).
            symbols: Which of all symbols these are.
        """
        tile, symbol, place = mask.unflatten(1, (-1, TILE)).transpose(0, 1).nonzero().unbind(1)
        digits = self._digits_of[symbols[symbol]]
        inside = digits >= 0
        tile, token = (each[:, None].expand_as(digits)[inside] for each in (tile, tile * TILE + place))
        return tile, digits[inside].long(), token
