"""`SubspaceBases`: in which subspaces a model's keys and values lie, calibrated once and kept as an artifact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from hf_kvcaches.core.artifact import Artifact
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.stores.reading import checked_layers

_LISTS = ("key_encode", "key_decode", "value_encode", "value_decode")
_PLAIN = ("gamma", "key_energies", "value_energies", "key_residual", "value_residual")


@dataclass(frozen=True, eq=False)
class LayerBases:
    """The bases of one layer. All float32 (what is narrower is cast), on the CPU; ranks r and s may differ from head to head.

    Args:
        key_encode: For each key head (r, d): a key k is kept as `encode @ k`.
        key_decode: For each key head (d, r): it is read as `decode @ encode @ k`.
        value_encode: For each key head (s, e), likewise for values.
        value_decode: For each key head (e, s).
        gamma: (kv_heads,): the factor on logits of decoded keys.
        key_energies: (kv_heads, d), the largest first: those from r on are lost. With the metric "attention", squared errors of the
            layer's output, which compare over heads, layers, keys and values; with "loss", twice the divergence of a token's prediction,
            likewise; with "plain", squared errors of the keys.
        value_energies: (kv_heads, e), likewise.
        key_residual: (kv_heads,): the percentile of `|k - decode @ encode @ k| / |k|`.
        value_residual: (kv_heads,), likewise.
    """

    key_encode: tuple[torch.Tensor, ...]
    key_decode: tuple[torch.Tensor, ...]
    value_encode: tuple[torch.Tensor, ...]
    value_decode: tuple[torch.Tensor, ...]
    gamma: torch.Tensor
    key_energies: torch.Tensor
    value_energies: torch.Tensor
    key_residual: torch.Tensor
    value_residual: torch.Tensor

    def __post_init__(self) -> None:
        # There is next to no arithmetic in 8 bits.
        for name in (*_LISTS, *_PLAIN):
            given = getattr(self, name)
            object.__setattr__(self, name, _wide(given) if isinstance(given, torch.Tensor) else tuple(map(_wide, given)))

    @property
    def kv_heads(self) -> int:
        """Key heads."""
        return len(self.gamma)

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(r, s) of each key head."""
        return [(len(key), len(value)) for key, value in zip(self.key_encode, self.value_encode, strict=True)]

    @property
    def full_size(self) -> int:
        """Elements that a token takes without the bases."""
        return self.key_energies.numel() + self.value_energies.numel()

    def kept(self) -> tuple[float, float]:
        """The shares of the energy of all heads' keys and values that is kept."""
        shares = []
        for energies, encode in ((self.key_energies, self.key_encode), (self.value_energies, self.value_encode)):
            top = sum(float(each[: len(basis)].double().sum()) for each, basis in zip(energies, encode, strict=True))
            whole = float(energies.double().sum())
            shares.append(top / whole if whole else 1.0)
        return shares[0], shares[1]


@dataclass(frozen=True)
class BasesSettings:
    """How bases were made.

    Args:
        rule: How ranks were chosen: the argument of `calibrate` and its value.
        rotation: Whether keys are projected before ("aware") or after ("post") the model rotates them.
        share: What has a basis of its own, "head" or "layer".
        multiple_of: What ranks are multiples of, unless they were given.
        block: Tokens of the longest sequence that was read.
        unprojected: Layers whose output projection was not found, so that "attention" took their heads' outputs for the layer's.
    """

    rule: dict[str, Any]
    rotation: Literal["aware", "post"]
    metric: Literal["attention", "loss", "plain"]
    gamma: Literal["calibrated", "one", "paper"]
    share: Literal["head", "layer"]
    multiple_of: int
    percentile: float
    head_dim: int
    block: int
    blocks: int
    tokens: int
    unprojected: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class SubspaceBases(Artifact):
    """Bases of the subspaces in which a model's keys and values are kept, for `SubspaceCache`.

    "Online Subspace Projection for KV Caches", the static method of sections 4 and 10. Made by `SubspaceBases.calibrate`.

    **Departs from the paper**: keys are projected before the rotation, where they need far fewer dimensions (`rotation="post"` is the
    paper's main text). Projections are oblique and lose least where attention feels it (`metric="plain"`: the paper's, from the vectors
    alone). Ranks can be spread over heads, layers, keys and values by a budget of bytes. Gamma is fitted, and comes out near 1;
    the paper's default of `sqrt(r / d)` is `gamma="paper"`.

    Args:
        layers: For each layer of the model its bases, or None where a method leaves it alone (windows, linear attention).
        settings: How they were made.
        fingerprint: The model that they are for.
    """

    artifact_type: ClassVar[str] = "subspace-bases"
    format_version: ClassVar[int] = 1

    layers: tuple[LayerBases | None, ...]
    settings: BasesSettings
    fingerprint: ModelFingerprint | None = None

    @classmethod
    def calibrate(
        cls,
        model: nn.Module,
        tokenizer: Any,
        texts: Iterable[str | Sequence[int]],
        *,
        rank: int | tuple[int, int] | None = None,
        energy: float | None = None,
        bytes_ratio: float | None = None,
        rotation: Literal["aware", "post"] = "aware",
        metric: Literal["attention", "loss", "plain"] = "attention",
        gamma: Literal["calibrated", "one", "paper"] = "calibrated",
        share: Literal["head", "layer"] = "head",
        multiple_of: int = 4,
        block: int = 512,
        batch_size: int = 1,
        max_tokens: int | None = None,
        percentile: float = 95,
        progress: bool = True,
    ) -> SubspaceBases:
        """Measures a model on texts, in one pass: sums of outer products and a bounded sample, never all keys.

        Exactly one of `rank`, `energy` and `bytes_ratio` says how many directions are kept. The texts should be like those that the model
        will read: what does not occur in them gets no rank. The model is left as it was found. In several processes under `accelerate`
        each takes every n-th block, and all get the same bases.

        Args:
            model: A transformers model, also inside a PEFT wrapper, that asks its attention by name.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids. A tokenizer's special tokens are added as usual.
            rank: Of all heads: `(keys, values)`, or one number for both.
            energy: The share of the energy that each head keeps, of its keys and of its values: 0.90 to 0.999 are usual.
            bytes_ratio: The share of the bytes of exact keys and values that all heads take together; more goes where it is worth more.
            rotation: "aware": before the rotation, which is done anew on reading. "post": keys as they are cached. The same in models
                without rotary positions.
            metric: "attention": what counts is the error of the layer's output. "loss": what that does to the model's predictions, which
                takes a pass back as well, through frozen and quantised models too; where there is none it is "attention", with a
                warning. "plain": the error of keys and values themselves.
            gamma: "calibrated" to true logits, "one", or the "paper"'s default.
            share: A basis for each "head", or one for all heads of a "layer".
            multiple_of: Ranks are rounded up to multiples of this, for the kernels' sake; not those given as `rank`.
            block: Texts are read in sequences of so many tokens, or what the model can read if that is less.
            batch_size: Sequences at a time.
            max_tokens: Stop after so many; None reads all.
            percentile: Of the relative residuals that become thresholds.
            progress: Whether to show a bar.
        """
        from hf_kvcaches.subspace.calibration import Reading, calibrate
        from hf_kvcaches.subspace.fitting import Choices

        choices = Choices(rank, energy, bytes_ratio, rotation, metric, gamma, share, multiple_of, percentile)
        return calibrate(model, tokenizer, texts, choices, Reading(block, batch_size, max_tokens, progress))

    @property
    def ranks(self) -> list[list[tuple[int, int]] | None]:
        """For each layer the (key rank, value rank) of each key head, or None."""
        return [None if layer is None else layer.ranks for layer in self.layers]

    def bytes_per_token(self, dtype_bytes: float = 2) -> float:
        """What a token takes in all layers that have bases.

        Args:
            dtype_bytes: Of one coefficient.
        """
        return dtype_bytes * sum(key + value for layer in self.layers if layer is not None for key, value in layer.ranks)

    @property
    def bytes_ratio(self) -> float:
        """The share of what exact keys and values of the same dtype take in these layers."""
        return self.bytes_per_token(1) / sum(layer.full_size for layer in self.layers if layer is not None)

    def require_model(self, model: nn.Module, tokenizer: Any = None) -> None:
        """Raises `FingerprintMismatch` if the bases were made for another model.

        Args:
            model: The model to use them with.
            tokenizer: Its tokenizer, compared as well where the bases were made with one.
        """
        if self.fingerprint is not None:
            self.fingerprint.require_model(model, "SubspaceBases", tokenizer)

    def __repr__(self) -> str:
        made = self.settings
        kinds = f"rotation={made.rotation!r}, metric={made.metric!r}, share={made.share!r}"
        layers = f"{sum(layer is not None for layer in self.layers)} of {len(self.layers)} layers"
        return f"SubspaceBases({layers}, {self.bytes_ratio:.3f} of the bytes, {kinds}, model {self.fingerprint})"

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            if layer is None:
                continue
            bases = 1 if self.settings.share == "layer" else layer.kv_heads
            found |= {f"layers.{index}.{name}.{head}": getattr(layer, name)[head] for name in _LISTS for head in range(bases)}
            found |= {f"layers.{index}.{name}": getattr(layer, name) for name in _PLAIN}
        return found

    def metadata(self) -> dict[str, Any]:
        settings = asdict(self.settings)
        settings |= {"rule": {name: _as_json(value) for name, value in self.settings.rule.items()}}
        return {"layers": len(self.layers), "settings": settings | {"unprojected": list(self.settings.unprojected)}}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        stored = dict(metadata["settings"])
        rule = {name: tuple(value) if isinstance(value, list) else value for name, value in stored["rule"].items()}
        settings = BasesSettings(**stored | {"rule": rule, "unprojected": tuple(stored["unprojected"])})
        layers = []
        for index in range(checked_layers(metadata["layers"])):
            prefix = f"layers.{index}."
            own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            layers.append(_layer(own, settings.share == "layer", prefix) if own else None)
        return cls(tuple(layers), settings)

    def describe_calibration(self) -> str:
        made = self.settings
        rows = {
            "text": f"{made.tokens:,} tokens in {made.blocks:,} sequences of up to {made.block:,}",
            "ranks by": ", ".join(f"{name} = {value}" for name, value in made.rule.items()),
            "memory": f"{self.bytes_ratio:.3f} of exact keys and values ({self.bytes_per_token():,.0f} bytes per token in half precision)",
            "rotation": made.rotation,
            "metric": made.metric,
            "gamma": made.gamma,
            "a basis for each": made.share,
        }
        if made.unprojected:
            rows["output projection not found in layers"] = ", ".join(map(str, made.unprojected))
        facts = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        head = "| layer | ranks of keys | ranks of values | energy of keys | energy of values | gamma |"
        table = "\n".join(_card_row(index, layer) for index, layer in enumerate(self.layers) if layer is not None)
        residuals = f"Residuals are at the {made.percentile:g}th percentile of `|x - Px| / |x|`."
        return f"| | |\n|---|---|\n{facts}\n\n{head}\n|---|---|---|---|---|---|\n{table}\n\nEnergies are the shares kept. {residuals}"


def _layer(own: dict[str, torch.Tensor], shared: bool, where: str) -> LayerBases:
    """A layer from its tensors, if they fit each other."""
    plain: dict[str, Any] = {name: own[name] for name in _PLAIN}
    heads = len(plain["gamma"])
    lists: dict[str, Any] = {name: tuple(own[f"{name}.{0 if shared else head}"] for head in range(heads)) for name in _LISTS}
    sound = all(len(each) == heads for each in plain.values())
    for kind in ("key", "value"):
        dim = plain[f"{kind}_energies"].shape[-1]
        for encode, decode in zip(lists[f"{kind}_encode"], lists[f"{kind}_decode"], strict=True):
            sound &= encode.shape == decode.mT.shape and encode.shape[-1] == dim and 1 <= len(encode) <= dim
    if not sound:
        raise ArtifactError(f"{where}*: the shapes of its tensors don't fit each other. Calibrate anew.")
    return LayerBases(**lists, **plain)


def _card_row(index: int, layer: LayerBases) -> str:
    keys, values = zip(*layer.ranks, strict=True)
    cells = [", ".join(map(str, keys)), ", ".join(map(str, values)), *(f"{share:.4f}" for share in layer.kept())]
    return f"| {index} | {' | '.join(cells)} | {float(layer.gamma.min()):.3f} to {float(layer.gamma.max()):.3f} |"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
