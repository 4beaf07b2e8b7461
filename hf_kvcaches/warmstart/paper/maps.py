"""What moves a summary to another prompt: `Adapters`, `SlotProjector`, and `PositionCorrection` where keys are not rotated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches.core.files import Artifact, markdown_table
from hf_kvcaches.core.identity import fingerprint_of
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError, whole_number
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.warmstart.entries import prompt_states
from hf_kvcaches.warmstart.paper.slots import Slots

_TINY = torch.finfo(torch.float64).tiny
# The correction of positions is fitted to this many prompts of random tokens, of at most this many tokens each.
_PROMPTS, _LONGEST = 8, 512


class Adapters(NamedTuple):
    """For each layer and key head a map of slots' keys and one of their values, `k @ A`.

    "CP-KVP", section 2.2. **Departs from the paper**: keys are mapped relative to the prompt's end (rotated back by its length), so that
    prompts of all lengths share a map and a shift may come before or after it.
    """

    keys: tuple[torch.Tensor, ...]  # (kv_heads, head_dim, head_dim), float32
    values: tuple[torch.Tensor, ...]  # (kv_heads, value_dim, value_dim), float32

    def apply(self, slots: Slots, geometries: Sequence[RotaryGeometry]) -> Slots:
        """Map the keys and values of slots."""
        layers = []
        for layer, geometry, key_map, value_map in zip(slots.layers, geometries, self.keys, self.values, strict=True):
            keys = geometry.shift(layer.keys[None].float(), -slots.length) @ key_map.to(layer.keys.device)
            keys = geometry.shift(keys, slots.length)[0].to(layer.keys.dtype)
            layers.append(LayerStates(keys, (layer.values.float() @ value_map.to(layer.values.device)).to(layer.values.dtype)))
        return replace(slots, layers=layers)


@dataclass(frozen=True, eq=False)
class TrainedAdapters(Artifact):
    """Adapters with what they were made for: a library must have the same slots, layout and tail.

    Args:
        adapters: For `SummaryLibrary(adapters=...)`.
        slots: That they map.
        layout: Of the slots: `"paper"`.
        tail: Tokens that are recomputed behind the slots.
        measured: One dict of measurements for each way in which adapters were made.
    """

    artifact_type: ClassVar[str] = "slot-adapters"
    format_version: ClassVar[int] = 1

    adapters: Adapters
    slots: int
    layout: str
    tail: int
    measured: tuple[dict[str, Any], ...] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        sides = self.adapters._asdict().items()
        return {f"{side}.{layer}": own.contiguous().cpu() for side, maps in sides for layer, own in enumerate(maps)}

    def metadata(self) -> dict[str, Any]:
        return {"slots": self.slots, "layout": self.layout, "tail": self.tail, "measured": list(self.measured)}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        names = [[f"{side}.{layer}" for layer in range(len(tensors) // 2)] for side in Adapters._fields]
        if tensors.keys() != {*names[0], *names[1]} or any(map.ndim != 3 or map.shape[1] != map.shape[2] for map in tensors.values()):
            raise ArtifactError(f"Stored adapters of { ({name: tuple(map.shape) for name, map in tensors.items()}) } fit no model.")
        adapters = Adapters(*(tuple(map(tensors.__getitem__, side)) for side in names))
        return cls(adapters, **{**metadata, "measured": tuple(metadata["measured"])})

    def describe_calibration(self) -> str:
        return f"For {self.slots} slots, layout {self.layout!r}, the last {self.tail} tokens run.\n\n{markdown_table(self.measured)}"

    def checked(self, model: PreTrainedModel, slots: int, layout: str, tail: int) -> Adapters:
        """Return the adapters if they were made for such summaries of a model, which has no PEFT wrapper."""
        settings, expected = (self.slots, self.layout, self.tail), (slots, layout, tail)
        if settings != expected:
            raise ConfigError.of("adapters", f"those for slots, layout and tail {expected}", settings, "Train others.")
        if self.fingerprint is not None:
            self.fingerprint.require_model(fingerprint_of(model), "The adapters")
        return self.adapters


class LayerReport(NamedTuple):
    """The cross-validation of one layer: squared errors on held-out targets, as a share of their sum of squares."""

    layer: int
    kept: bool  # whether the fitted map is used; otherwise the identity is
    identity_error: float  # of the source's slots, the mean of keys and values
    fitted_error: float  # of a map that was fitted to the other pairs


@dataclass(frozen=True, eq=False)
class SlotProjector:
    """For each layer a matrix over the slots, learned from pairs of prompts, or the identity where it does not help.

    "CP-KVP", section 2.3: ridge regression from the slots of one prompt to those of another, with keys relative to the prompts' ends.
    Positions stay the source's.

    **Departs from the paper**: the regulariser is `|M - I|^2` and not `|M|^2`. Keys and values have the same weight in the fit, and gamma
    is a share of the mean square of a slot. A map that does not improve held-out pairs is dropped.

    **What to expect**: slots come closer, and predictions don't (docs/benchmarks/warmstart.md).

    Args:
        maps: For each layer (slots, slots), float32; None for the identity.
        reports: The cross-validation of each layer.
    """

    maps: tuple[torch.Tensor | None, ...]
    reports: tuple[LayerReport, ...] = ()

    @classmethod
    def fit(
        cls, pairs: Iterable[tuple[Slots, Slots]], geometries: Sequence[RotaryGeometry], *, gamma: float = 1e-3, folds: int = 5
    ) -> SlotProjector:
        """Fit maps to pairs.

        Args:
            pairs: (source, target), all with the same number of slots. At least two, since one is held out.
            geometries: How each layer rotates.
            gamma: The weight of the distance from the identity, above 0, in units of one slot's mean square over all pairs.
            folds: Folds of the cross-validation. Pair i is held out in fold `i % folds`: put similar pairs `folds` apart.
        """
        if not gamma > 0:
            raise ConfigError.of("gamma", "a number above 0", gamma)
        folds, pairs = whole_number("folds", folds, 2), list(pairs)
        if len(pairs) < 2:
            raise ConfigError.of("pairs", "at least two, because one is held out", len(pairs))
        shapes = {tuple(layer.keys.shape[:2] for layer in slots.layers) for pair in pairs for slots in pair}
        if len(shapes) > 1:
            raise ConfigError.of("pairs", "as many layers, heads and slots in all sources and targets", shapes)
        fits = [_fitted(pairs, layer, geometry, gamma, folds) for layer, geometry in enumerate(geometries)]
        return cls(tuple(mixing if report.kept else None for mixing, report in fits), tuple(report for _, report in fits))

    def apply(self, slots: Slots, length: int, geometries: Sequence[RotaryGeometry]) -> Slots:
        """Map a prompt's slots to those of a similar one of `length` tokens, in a model that rotates by `geometries`."""
        layers = []
        for index, (layer, mixing) in enumerate(zip(slots.layers, self.maps, strict=True)):
            if mixing is not None:
                if layer.keys.shape[1] != len(mixing):
                    hint = "Slots of a prompt too short to fill them can't be projected."
                    raise ConfigError.of("slots", f"{len(mixing)} slots in layer {index}, as in the fit", layer.keys.shape[1], hint)
                layer = LayerStates(*((mixing.to(states.device) @ states.float()).to(states.dtype) for states in layer))
            layers.append(layer)
        # The map mixes slots and the rotation mixes the channels of a key, so their order makes no difference.
        return replace(slots, layers=layers).shifted(length - slots.length, geometries)


def _fitted(
    pairs: Sequence[tuple[Slots, Slots]], layer: int, geometry: RotaryGeometry, gamma: float, folds: int
) -> tuple[torch.Tensor, LayerReport]:
    """Fit one layer's map."""
    sides = []
    for prompts in zip(*pairs, strict=True):
        keys = [geometry.shift(prompt.layers[layer].keys.double()[None], -prompt.length)[0] for prompt in prompts]
        sides.append((torch.stack(keys), torch.stack([prompt.layers[layer].values.double() for prompt in prompts])))
    # Keys may be several times as large as values; both get the same weight.
    weights = [target.norm().clamp_min(_TINY) for target in sides[1]]
    # (pairs, kv_heads, slots, channels): keys relative to the prompts' ends, beside values.
    sources, targets = (torch.cat([states / weight for states, weight in zip(side, weights, strict=True)], -1) for side in sides)
    change, eye = targets - sources, torch.eye(sources.shape[2], dtype=sources.dtype, device=sources.device)

    def fit(chosen: Any) -> torch.Tensor:
        """Solve the ridge regression for M - I on some pairs, (slots, slots)."""
        gram, cross = ((states[chosen] @ sources[chosen].mT).sum((0, 1)) for states in (sources, change))
        return torch.linalg.solve(gram + gamma * gram.diagonal().mean().clamp_min(_TINY) * eye, cross.mT).mT

    fold = torch.arange(len(sources)) % folds
    errors = [(change - fit(fold != held_out) @ sources)[fold == held_out].square().sum() for held_out in range(folds)]
    identity, error = float(change.square().sum()), float(sum(errors))
    return (eye + fit(slice(None))).float().cpu(), LayerReport(layer, error < identity, identity / 2, error / 2)


def repaired(positions: torch.Tensor, last: int) -> torch.Tensor:
    """Make ascending integer positions, (slots,), distinct and between 0 and `last`, which is at least slots - 1.

    "CP-KVP", section 2.4b: each is raised to at least one above the previous one. Those that would exceed `last` move down, and stay
    distinct.
    """
    slots = len(positions)
    last = whole_number("last", last, slots - 1, f"an integer of at least {slots - 1}, so that {slots} slots have a position each")
    # Minus their ranks, distinct ascending positions are a non-decreasing sequence, with the same bounds for all.
    ranks = torch.arange(slots, dtype=positions.dtype, device=positions.device)
    return (positions - ranks).cummax(-1).values.clamp(0, last - slots + 1) + ranks


@dataclass(frozen=True, eq=False)
class PositionCorrection:
    """The change of a key when its slot moves, in models with learned positions. Experimental.

    "CP-KVP", section 2.4b, which learns a function B of the position for each head. Here B(t) is a linear map of the model's embedding of
    position t: exact in the first layer but for the LayerNorm's scale, and the best linear guess in higher ones. Values stay as they are.

    **Departs from the paper**: B is fitted in closed form, to keys at known positions and not to outputs of attention. Slots get the
    difference of B between both positions, so they do not change at their original length.
    """

    embeddings: torch.Tensor  # (positions, embedding), float32
    maps: tuple[torch.Tensor, ...]  # for each layer (kv_heads, embedding, head_dim), float32

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> PositionCorrection:
        """Fit a correction to a model with positions like GPT-2's, on random prompts that are the same in every process."""
        table = next((module for name, module in model.named_modules() if name.rpartition(".")[2] == "wpe"), None)
        if not isinstance(table, nn.Embedding):
            sentence = "this model has no table of learned positions as GPT-2 has it (`wpe`). Leave it out."
            raise UnsupportedError(f"correct_positions: {sentence}")
        tokens, vocabulary = min(_LONGEST, table.num_embeddings), model.get_input_embeddings().num_embeddings
        prompts = torch.randint(0, vocabulary, (_PROMPTS, tokens), generator=torch.Generator().manual_seed(0)).tolist()
        return cls.fit(table.weight, [([keys for keys, _ in prompt_states(model, ids)], torch.arange(tokens)) for ids in prompts])

    @classmethod
    def fit(
        cls, embeddings: torch.Tensor, prompts: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]], gamma: float = 1e-3
    ) -> PositionCorrection:
        """Fit a ridge regression, with an intercept, from a token's position embedding to its key.

        Args:
            embeddings: The model's position embeddings, (positions, embedding).
            prompts: Keys of each layer, (kv_heads, tokens, head_dim), and the tokens' positions, (tokens,) integers.
            gamma: The ridge penalty, above 0, in units of the mean variance of a dimension of the embeddings at these positions.
        """
        embeddings, indices = embeddings.detach().cpu(), torch.cat([positions for _, positions in prompts] or [torch.arange(0)])
        if len(indices.unique()) < 2 or int(indices.min()) < 0 or int(indices.max()) >= len(embeddings):
            raise ConfigError.of("prompts", f"tokens at two positions at least, from 0 to {len(embeddings) - 1}", indices.tolist())
        rows = embeddings.double()[indices]
        centred = rows - rows.mean(0)
        gram = centred.mT @ centred
        damping = gamma * gram.diagonal().mean() * torch.eye(gram.shape[0], dtype=gram.dtype)
        maps = []
        for layer in zip(*(keys for keys, _ in prompts), strict=True):
            # Rows are centred, so the keys' mean drops out of the product.
            keys = torch.cat([states.detach().double().cpu() for states in layer], 1)
            maps.append(torch.linalg.solve(gram + damping, centred.mT @ keys).float())
        return cls(embeddings.float(), tuple(maps))

    def shifted(self, slots: Slots, delta: int) -> Slots:
        """Move slots to the end of a prompt that is `delta` tokens longer, at integer positions."""
        length = slots.length + delta
        if not 1 <= length <= len(self.embeddings):
            raise ConfigError.of("delta", f"what makes a prompt of 1 to {len(self.embeddings)} tokens", f"{delta}, which makes {length}")
        if delta == 0:
            return slots
        # The prompt's last token has the position behind all slots.
        before, after = slots.positions.round().long(), repaired((slots.positions + delta).round().long(), max(length - 2, 0))
        change, layers = self.embeddings[after] - self.embeddings[before], []
        for (keys, values), mapping in zip(slots.layers, self.maps, strict=True):
            layers.append(LayerStates((keys.float() + (change @ mapping).to(keys.device)).to(keys.dtype), values))
        return Slots(layers, after.float(), length)
