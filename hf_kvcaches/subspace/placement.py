"""Which tokens of a row lie where: the first ones and the newest exactly, those between them as codes.

Each row is placed as if it were alone: its first `sinks` and last `recent` real tokens are exact, and its codes follow each other. While no
token is padding, everything is a slice. Else `columns` says which token of the model's input is in each slot, and rows with fewer tokens
leave slots of codes empty at the end, those of exact tokens at the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_EMPTY = -1


@dataclass(frozen=True, eq=False)
class Placement:
    """The slots of one layer, and of all others: sinks, then codes, then recent tokens.

    Args:
        sinks: First tokens of each row that stay exact.
        recent: Newest ones.
        warmup: A row has no codes before it has so many tokens behind the sinks.
        seen: Tokens that the model has fed in.
        first: Slots of sinks in use.
        coded: Slots of codes.
        newest: Slots of recent tokens in use.
        columns: Which token is in each slot, (batch, first + coded + newest), -1 for none; None while slots follow the text.
        positions: The model's positions of all tokens, (batch, seen), int32; None while these are their numbers.
    """

    sinks: int
    recent: int
    warmup: int = 0
    seen: int = 0
    first: int = 0
    coded: int = 0
    newest: int = 0
    columns: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def place(self, tokens: int, valid: torch.Tensor | None, positions: torch.Tensor | None, rows: int, device: torch.device) -> Intake:
        """Where new tokens go, and which of those before become codes.

        Args:
            valid: True where a new token is real, (batch, tokens), or None for all.
            positions: Of the new tokens, (batch or 1, tokens), or None where these are their numbers.
        """
        known = self._positions_with(tokens, positions, rows, device)
        if valid is None and self.columns is None:
            new_sinks = min(max(0, self.sinks - self.seen), tokens)
            held = self.newest + tokens - new_sinks
            leaving = max(0, held - self.recent) if self.coded + held >= self.warmup else 0
            first, coded, newest = self.first + new_sinks, self.coded + leaving, held - leaving
            after = replace(self, seen=self.seen + tokens, first=first, coded=coded, newest=newest, positions=known)
            return Intake(self, after, leaving, ((self.coded, leaving),) * rows, new_sinks)
        return self._place_padded(tokens, valid, known, rows, device)

    def _place_padded(
        self, tokens: int, valid: torch.Tensor | None, positions: torch.Tensor | None, rows: int, device: torch.device
    ) -> Intake:
        valid = torch.ones(rows, tokens, dtype=torch.bool, device=device) if valid is None else valid
        old_sinks, old_codes, old_recent = self._columns(rows, device)
        new = torch.arange(self.seen, self.seen + tokens, device=device).where(valid, _EMPTY)
        coded = (old_codes >= 0).sum(1)
        before = sum((each >= 0).sum(1, keepdim=True) for each in (old_sinks, old_codes, old_recent))
        numbers = (before + valid.cumsum(1) - 1).masked_fill(~valid, _EMPTY)
        # The new token with number j goes to sink j.
        match = numbers[:, None] == torch.arange(self.sinks, device=device)[:, None]
        sink_index, sink_found = match.to(torch.uint8).argmax(-1) if tokens else old_sinks, match.any(-1)
        sinks = new.gather(1, sink_index).where(sink_found, old_sinks) if tokens else old_sinks
        held = torch.cat([old_recent, new.masked_fill(numbers < self.sinks, _EMPTY)], 1)
        # The tokens of a row at the end, in their order: the oldest leave.
        order = (held >= 0).to(torch.uint8).argsort(dim=1, stable=True)
        used = (held >= 0).sum(1)
        leaving = (used - self.recent).clamp(min=0).where(coded + used >= self.warmup, 0)
        leave, stay = int(leaving.max()), int((used - leaving).max())
        places = torch.arange(leave, device=device)
        left, right = (held.shape[1] - used)[:, None] + places, held.shape[1] - stay + torch.arange(stay, device=device)
        order = torch.cat([order.gather(1, left.clamp(max=held.shape[1] - 1)), order[:, right]], 1)
        held = held.gather(1, order)
        gone, held = held.split([leave, stay], 1)
        gone = gone.masked_fill(places >= leaving[:, None], _EMPTY)
        held = held.masked_fill(torch.arange(stay, 0, -1, device=device) > (used - leaving)[:, None], _EMPTY)
        slots = coded[:, None] + places
        codes = torch.nn.functional.pad(old_codes, (0, leave), value=_EMPTY).scatter(1, slots, gone)
        codes = codes[:, : int((coded + leaving).max())]
        after = replace(
            self,
            seen=self.seen + tokens,
            first=self.sinks,
            coded=codes.shape[1],
            newest=stay,
            columns=torch.cat([sinks, codes, held], 1),
            positions=positions,
        )
        spans = tuple(zip(coded.tolist(), leaving.tolist(), strict=True))
        return Intake(self, after, leave, spans, 0, (sink_index, sink_found), order, slots, torch.cat([gone, held], 1))

    def _columns(self, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The columns of sinks, all of them, of codes and of recent tokens, (batch, slots) each."""
        columns = self.columns
        if columns is None:
            columns = torch.arange(self.seen, device=device).expand(rows, -1)
        first, codes, recent = columns.split([self.first, self.coded, self.newest], 1)
        return torch.nn.functional.pad(first, (0, self.sinks - self.first), value=_EMPTY), codes, recent

    def _positions_with(self, tokens: int, new: torch.Tensor | None, rows: int, device: torch.device) -> torch.Tensor | None:
        if new is None and self.positions is None:
            return None
        before = torch.arange(self.seen, device=device).expand(rows, -1) if self.positions is None else self.positions
        if new is None:
            new = torch.arange(self.seen, self.seen + tokens, device=device)[None]
        return torch.cat([before.to(torch.int32), new.expand(rows, -1).to(torch.int32)], 1)

    def code_positions(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """The model's positions of some slots of codes, (batch or 1, slots); any number where a slot is empty."""
        first = self.first + start
        if self.columns is None:
            if self.positions is not None:
                return self.positions[:, first : self.first + stop]
            return torch.arange(first, self.first + stop, device=device)[None]
        return self.positions_of(self.columns[:, first : self.first + stop])

    def positions_of(self, columns: torch.Tensor) -> torch.Tensor:
        """The model's positions of some tokens, (batch, n); any number where there is none."""
        columns = columns.clamp(min=0)
        return columns if self.positions is None else self.positions.gather(1, columns)

    def shown(self, allowed: torch.Tensor | None, rows: int, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which exact tokens and which codes new queries may see, (batch, queries or 1, slots) each, or None for all.

        Args:
            allowed: What the model's mask says of all tokens, (batch or 1, 1, queries, seen), or None.
        """
        if self.columns is None and allowed is None:
            return None, None
        columns = torch.cat(self._columns(rows, device), 1)
        shown = (columns >= 0)[:, None]
        if allowed is not None:
            index = columns.clamp(min=0)[:, None].expand(-1, allowed.shape[2], -1)
            shown = shown & allowed[:, 0].expand(rows, -1, -1).gather(2, index)
        sinks, codes, recent = shown.split([self.sinks, self.coded, self.newest], 2)
        return torch.cat([sinks[..., : self.first], recent], 2), codes


@dataclass(frozen=True, eq=False)
class Intake:
    """What happens to new tokens.

    Args:
        before: The slots so far.
        after: The slots with them.
        leaving: How many of the recent and new tokens become codes, in the row with most.
        spans: For each row how many codes it has so far, and how many more it gets.
        new_sinks: While slots follow the text: how many of the new tokens are sinks.
        sinks: Else, for each sink which new token it is, (batch, sinks), and whether it is one.
        order: Else, which of the recent and new tokens, side by side, become codes and which stay, (batch, leaving + newest).
        slots: Else, where the new codes go, (batch, leaving); slots behind those of a row are free.
        held: Else, the tokens in that order, (batch, leaving + newest), -1 for none.
    """

    before: Placement
    after: Placement
    leaving: int
    spans: tuple[tuple[int, int], ...]
    new_sinks: int = 0
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None
    order: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    held: torch.Tensor | None = None

    def positions(self, count: int, device: torch.device) -> torch.Tensor:
        """The model's positions of the first of the tokens that become codes or stay, (batch or 1, count)."""
        if self.held is not None:
            return self.after.positions_of(self.held[:, :count])
        start = self.before.coded
        return self.after.code_positions(start, start + count, device)

    def exact(self, sinks: torch.Tensor | None, recent: torch.Tensor | None, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sinks, and the recent and new tokens that stay or become codes.

        Args:
            sinks: As kept so far, (batch, heads, first, d), or None for none.
            recent: The newest tokens as kept so far, (batch, heads, newest, d), or None for none.
            new: (batch, heads, tokens, d).
        """
        if sinks is None or recent is None:
            sinks = recent = new[:, :, :0].clone()
        if self.sinks is None or self.order is None:
            rest = new[:, :, self.new_sinks :]
            first = torch.cat([sinks, new[:, :, : self.new_sinks]], 2) if self.new_sinks else sinks
            return first, torch.cat([recent, rest], 2) if recent.shape[2] else rest
        index, found = self.sinks
        slots = torch.nn.functional.pad(sinks, (0, 0, 0, self.before.sinks - sinks.shape[2]))
        first = torch.where(found[:, None, :, None], gathered(new, index), slots) if self.before.sinks else slots
        return first, gathered(torch.cat([recent, new], 2), self.order)


def gathered(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """source[b, h, index[b, n]], (batch, heads, n, d).

    Args:
        source: (batch, heads, slots, d).
        index: (batch, n).
    """
    return source.gather(2, index[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))
