"""`KVCodec`: a model's keys and values in few bits, calibrated once and kept as an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_kvcaches.codec import allocation, saved_cache
from hf_kvcaches.codec.coder import LayerCoder
from hf_kvcaches.codec.layout import packed_bytes
from hf_kvcaches.codec.metric import Metric
from hf_kvcaches.codec.sides import EXACT, CalibratedLayer, CalibratedSide
from hf_kvcaches.codec.wire import codes as wire
from hf_kvcaches.core.files import checked_layers
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.core.identity import fingerprint_of
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.rope import RotaryGeometry, undoable_rotation
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError, require_choice
from hf_kvcaches.kernels.checksum import digest_of
from hf_kvcaches.stores.streams import Source


@dataclass(frozen=True)
class CodecSettings:
    """How a codec was made.

    Args:
        rotation: Whether keys are coded before ("aware") or after ("post") the model rotates them.
        metric: By which errors count.
        rule: How bits were allotted: the argument of `KVCodec.at` and its value.
        widths: The bits that a direction may have.
        gamma: The factor on decoded keys: "one", or the "paper"'s.
        block: Tokens of the longest sequence that was read.
    """

    rotation: Literal["aware", "post"]
    metric: Metric
    rule: dict[str, Any]
    widths: tuple[int, ...]
    gamma: Literal["one", "paper"]
    block: int
    blocks: int
    tokens: int


@dataclass(frozen=True, eq=False, repr=False)
class KVCodec(Artifact):
    """Codes of a model's keys and values: a basis for each head in which errors cost alike, and bits where they count.

    One codec serves memory (`SubspaceCache`), stores and the wire. Keys are coded before their rotation, so that codes do not depend on
    positions. Nothing is stored for a token or a group besides its codes: steps and means are calibrated.

    "Online Subspace Projection for KV Caches", the static method of sections 4 and 10, is `at(rank=..., widths=16)`.

    **Departs from the paper**: bases are oblique and lose least where the model's predictions feel it (`metric="plain"` is the paper's);
    keys are projected before the rotation (`rotation="post"` is the paper's main text); each direction has as many bits as are worth
    their bytes, over all layers, heads, keys and values together. `gamma="paper"` is the paper's factor of `sqrt(r / d)` on logits.

    Args:
        layers: For each layer of the model its transforms and bits, or None where a method leaves it alone (windows, linear attention).
        settings: How it was made.
        fingerprint: The model that it is for.
    """

    artifact_type: ClassVar[str] = "kv-codec"
    format_version: ClassVar[int] = 2

    layers: tuple[CalibratedLayer | None, ...]
    settings: CodecSettings
    fingerprint: ModelFingerprint | None = None

    @classmethod
    def calibrate(
        cls,
        model: nn.Module,
        tokenizer: Any,
        texts: Iterable[str | Sequence[int]],
        bytes_ratio: float | None = None,
        *,
        rank: int | tuple[int, int] | None = None,
        energy: float | None = None,
        widths: int | Sequence[int] | None = None,
        gamma: Literal["one", "paper"] = "one",
        rotation: Literal["aware", "post"] = "aware",
        metric: Metric = "loss",
        block: int = 512,
        batch_size: int = 1,
        max_tokens: int | None = None,
        progress: bool = True,
    ) -> KVCodec:
        """Measures a model on texts, in one pass: sums of outer products and a bounded sample, never all keys.

        The texts should be like those that the model will read. The model is left as it was found. In several processes under
        `accelerate` each takes every n-th block, and all get the same codec. For other bits call `at`, which reads nothing again.

        Args:
            model: A transformers model, also inside a PEFT wrapper, that asks its attention by name.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids. A tokenizer's special tokens are added as usual.
            bytes_ratio: As for `at`; 0.125 if neither `rank` nor `energy` is given.
            rank: As for `at`.
            energy: As for `at`.
            widths: As for `at`.
            gamma: As for `at`.
            rotation: "aware": keys before the rotation, which is done anew on reading. "post": keys as they are cached. The same in
                models without rotary positions.
            metric: "loss": errors count by what they do to the model's predictions, which takes a backward pass, through frozen and
                quantised models too; where there is none it is "attention", with a warning. "attention": by the error of the layer's
                output. "plain": by the error of keys and values themselves.
            block: Texts are read in sequences of so many tokens, or what the model can read if that is less.
            batch_size: Sequences at a time.
            max_tokens: Stop after so many; None reads all.
            progress: Whether to show a bar.
        """
        from hf_kvcaches.codec.calibration import Reading, measure
        from hf_kvcaches.codec.fit import fit_layer

        if bytes_ratio is None and rank is None and energy is None:
            bytes_ratio = 0.125
        choice = allocation.BitRule.of(bytes_ratio, rank, energy, widths)
        require_choice("gamma", gamma, ("one", "paper"))
        measured = measure(model, tokenizer, texts, Reading(rotation, metric, block, batch_size, max_tokens, progress))
        with torch.no_grad():
            fitted = {index: fit_layer(meter) for index, meter in measured.meters.items()}
        layers = tuple(fitted.get(index) for index in range(measured.layers))
        reading = measured.reading
        settings = CodecSettings(
            rotation, reading.metric, choice.rule, choice.widths, gamma, reading.block, measured.blocks, measured.tokens
        )
        fingerprint = ModelFingerprint.of(model, tokenizer if measured.used_tokenizer else None)
        return cls(layers, settings, fingerprint)._with(choice)

    def at(
        self,
        bytes_ratio: float | None = None,
        *,
        rank: int | tuple[int, int] | None = None,
        energy: float | None = None,
        widths: int | Sequence[int] | None = None,
        gamma: Literal["one", "paper"] | None = None,
    ) -> KVCodec:
        """The codec with other bits, from what was measured when it was calibrated.

        Args:
            bytes_ratio: The bytes of a token's codes as a share of those of its exact keys and values in 16 bits. Bits go where they save
                most, over all layers, heads, keys and values together.
            rank: In place of it: how many directions each head keeps, `(keys, values)`, or one number for both.
            energy: In place of it: the share of the energy that each head keeps, of its keys and of its values: 0.90 to 0.999 are usual.
            widths: The bits that a direction may have, of 1, 2, 3, 4, 5, 6, 8, 16 and 24. With `rank` and `energy` a single one, 16 unless
                given; else (1, 2, 4, 6, 8).
            gamma: The factor on decoded keys: "one", or the "paper"'s `sqrt(r / d)`. None: as it is.
        """
        choice = allocation.BitRule.of(bytes_ratio, rank, energy, widths)
        require_choice("gamma", gamma, ("one", "paper", None))
        return replace(self, settings=replace(self.settings, gamma=gamma or self.settings.gamma))._with(choice)

    def of_heads(self, shard: HeadShard | None) -> KVCodec:
        """The codec of the heads that a process has under tensor parallelism; this one where it has all."""
        if shard is None:
            return self
        shards: dict[tuple[int, int], KVCodec] = self.__dict__.setdefault("_shards", {})  # with coders of their own
        if (shard.rank, shard.size) not in shards:
            layers = tuple(layer and CalibratedLayer(layer.keys.of_heads(shard), layer.values.of_heads(shard)) for layer in self.layers)
            shards[shard.rank, shard.size] = replace(self, layers=layers)
        return shards[shard.rank, shard.size]

    def _with(self, choice: allocation.BitRule) -> KVCodec:
        chosen = iter(choice.allot([layer for layer in self.layers if layer is not None]))
        layers = tuple(None if layer is None else next(chosen) for layer in self.layers)
        return KVCodec(layers, replace(self.settings, rule=choice.rule, widths=choice.widths), self.fingerprint)

    @property
    def unrotated(self) -> bool:
        """Whether keys are coded before their rotation."""
        return self.settings.rotation == "aware"

    @property
    def exact_tokens(self) -> int:
        """How many of a text's first tokens stores keep exact beside their codes, because they are outliers."""
        return EXACT

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's codes in all layers that are coded."""
        return sum(filter(None, self.layer_bytes))

    @cached_property
    def layer_bytes(self) -> tuple[int | None, ...]:
        """Those of each layer, or None where it is not coded."""
        return tuple(layer and sum(packed_bytes(side.widths) for side in layer) for layer in self.layers)

    @cached_property
    def separate_bytes(self) -> tuple[int | None, ...]:
        """`layer_bytes` where each byte belongs to one head."""
        return tuple(layer and sum(packed_bytes(head) for side in layer for head in side.widths) for layer in self.layers)

    @property
    def bytes_ratio(self) -> float:
        """Those bytes as a share of exact keys and values in 16 bits."""
        return self.bytes_per_token / (2 * sum(layer.elements for layer in self.layers if layer is not None))

    @cached_property
    def digest(self) -> str:
        """A name of all that decides how codes are read."""
        return digest_of({"tensors": self.tensors(), "metadata": json.dumps(self.metadata(), sort_keys=True)})

    @property
    def ranks(self) -> list[list[tuple[int, int]] | None]:
        """For each layer the directions that each head keeps, (keys, values), or None."""
        counts = [None if layer is None else [(side.widths > 0).sum(1).tolist() for side in layer] for layer in self.layers]
        return [None if each is None else list(zip(*each, strict=True)) for each in counts]

    def coder(self, layer_idx: int, dtype: torch.dtype, device: torch.device, separate: bool = False) -> LayerCoder:
        """The coder of one layer, made once for each dtype and device and shared by all caches and stores.

        Args:
            dtype: Of decoded keys and values.
            separate: Whether each byte belongs to one head.
        """
        coders: dict[Any, LayerCoder] = self.__dict__.setdefault("_coders", {})
        key = (layer_idx, dtype, device, separate)
        if key not in coders:
            layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
            if layer is None:
                raise ConfigError.of("codec", f"codes for layer {layer_idx}", f"a codec of {len(self.layers)} layers without it")
            # A later pass may need gradients, which tensors of the caller's inference mode refuse.
            with torch.inference_mode(False), torch.no_grad():
                coders[key] = LayerCoder(layer, self.gamma(layer), dtype, device, separate)
        return coders[key]

    def encode(self, keys: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The codes of tokens, for each layer (batch, bytes, tokens), uint8, or None where the layer is not coded.

        Args:
            keys: For each layer (batch, kv_heads, tokens, head_dim), before rotation unless the codec was made with rotation="post".
                Those of layers that are not coded are ignored.
            values: Like `keys`.
        """
        if len(keys) != len(self.layers) or len(values) != len(self.layers):
            raise ConfigError.of("keys, values", f"one tensor for each of {len(self.layers)} layers", (len(keys), len(values)))
        found: list[torch.Tensor | None] = []
        for index, (layer, key, value) in enumerate(zip(self.layers, keys, values, strict=True)):
            if layer is None:
                found.append(None)
                continue
            for name, states, side in (("keys", key, layer.keys), ("values", value, layer.values)):
                if states is None or states.ndim != 4 or (states.shape[1], states.shape[3]) != side.shape:
                    expected = f"(batch, {side.shape[0]}, tokens, {side.shape[1]})"
                    raise ConfigError.of(f"{name}[{index}]", expected, None if states is None else tuple(states.shape))
            assert key is not None
            assert value is not None
            if (len(key), key.shape[2]) != (len(value), value.shape[2]):
                expected = f"as many rows and tokens as keys[{index}], {tuple(key.shape)}"
                raise ConfigError.of(f"values[{index}]", expected, tuple(value.shape))
            found.append(self.coder(index, key.dtype, key.device).encode(key, value))
        return found

    def decode(
        self, codes: Sequence[torch.Tensor | None], dtype: torch.dtype = torch.float32
    ) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Keys and values from their codes, for each layer (batch, kv_heads, tokens, head_dim), or None where the layer is not coded.

        Args:
            codes: What `encode` gave.
            dtype: Of the result.
        """
        if len(codes) != len(self.layers):
            raise ConfigError.of("codes", f"one tensor for each of {len(self.layers)} layers", len(codes))
        return [None if each is None else self.coder(index, dtype, each.device).decode(each) for index, each in enumerate(codes)]

    def to_bytes(self, codes: Sequence[torch.Tensor | None]) -> bytes:
        """Codes as a message, which names this codec and is checked where it is read.

        Args:
            codes: What `encode` gave.
        """
        batch, tokens = next(((each.shape[0], each.shape[-1]) for each in codes if each is not None), (0, 0))
        shapes = [None if each is None else (each.dtype, *each.shape) for each in codes]
        expected = [None if count is None else (torch.uint8, batch, count, tokens) for count in self.layer_bytes]
        if shapes != expected:
            raise ConfigError.of("codes", f"such as this codec's encode gives, {expected}", shapes)
        return b"".join(wire.written(wire.CodecHead(self.digest, batch, tokens, self.layer_bytes), codes))

    def from_bytes(self, data: Source) -> list[torch.Tensor | None]:
        """Codes from a message of `to_bytes`; anything else is an `ArtifactError`.

        Args:
            data: All of its bytes, whole or in pieces, or a function that returns between 1 and the given number of them, such as a
                connected socket's `recv`.
        """
        return wire.read(data, self.digest, self.layer_bytes)

    def encode_layer(
        self, config: PreTrainedConfig, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, padding: list[int]
    ) -> dict[str, torch.Tensor]:
        """What a saved cache has of a layer's exact keys and values; see `CacheCodec`."""
        layer, shapes = self.layers[layer_idx], [(states.shape[1], states.shape[3]) for states in (keys, values)]
        if layer is None or shapes != [side.shape for side in layer]:
            raise ConfigError.of("codec", f"one for keys and values of layer {layer_idx}, {shapes}", self)
        coder = self.coder(layer_idx, keys.dtype, keys.device)
        return saved_cache.encode(coder, self.geometry(config, layer_idx), keys, values, padding)

    def decode_layer(
        self, config: PreTrainedConfig, layer_idx: int, stored: dict[str, torch.Tensor], padding: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of `encode_layer`."""
        coder = self.coder(layer_idx, stored["first_keys"].dtype, stored["codes"].device)
        return saved_cache.decode(coder, self.geometry(config, layer_idx), stored, padding)

    def require_all_layers(self, model: nn.Module, where: str) -> None:
        """Refuses a codec of another model, or one that leaves layers out.

        Args:
            where: What needs all layers, for the error.
        """
        self.require_model(model)
        missing = [index for index, layer in enumerate(self.layers) if layer is None]
        if missing:
            raise UnsupportedError(f"{where}: the codec has no codes for the layers {missing}, which attend to a window. Use 'int8'.")

    def require_model(self, model: nn.Module, tokenizer: Any = None) -> None:
        """Raises `FingerprintMismatch` if the codec was made for another model.

        Args:
            model: The model to use it with.
            tokenizer: Its tokenizer, compared as well where the codec was made with one.
        """
        if self.fingerprint is not None:
            self.fingerprint.require_model(fingerprint_of(model), "KVCodec", tokenizer)

    def geometry(self, config: PreTrainedConfig, layer_idx: int) -> RotaryGeometry | None:
        """How a layer rotates keys, which the codec takes before that; None where it takes them as they are cached."""
        if not self.unrotated:
            return None
        return undoable_rotation(config, layer_idx, "codec", "Calibrate with rotation='post'.")

    def gamma(self, layer: CalibratedLayer) -> torch.Tensor:
        """What decoded keys are multiplied with, for each head of a layer, (kv_heads,)."""
        heads, dim = layer.keys.shape
        if self.settings.gamma == "one":
            return torch.ones(heads)
        return ((layer.keys.widths > 0).sum(1) / dim).sqrt()

    def __repr__(self) -> str:
        made = self.settings
        layers = f"{sum(layer is not None for layer in self.layers)} of {len(self.layers)} layers"
        kinds = f"rotation={made.rotation!r}, metric={made.metric!r}"
        return f"KVCodec({layers}, {self.bytes_ratio:.4f} of the bytes, {kinds}, model {self.fingerprint})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_coders", "_shards")}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"layers.{index}.{kind}.{name}": tensor
            for index, layer in enumerate(self.layers)
            if layer is not None
            for kind, side in (("keys", layer.keys), ("values", layer.values))
            for name, tensor in side.tensors().items()
        }

    def metadata(self) -> dict[str, Any]:
        settings = asdict(self.settings)
        rule = {name: list(value) if isinstance(value, tuple) else value for name, value in self.settings.rule.items()}
        return {"layers": len(self.layers), "settings": settings | {"rule": rule, "widths": list(self.settings.widths)}}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        stored = dict(metadata["settings"])
        rule = {name: tuple(value) if isinstance(value, list) else value for name, value in stored["rule"].items()}
        settings = CodecSettings(**stored | {"rule": rule, "widths": tuple(stored["widths"])})
        layers: list[CalibratedLayer | None] = []
        for index in range(checked_layers(metadata["layers"])):
            sides = []
            for kind in ("keys", "values"):
                prefix = f"layers.{index}.{kind}."
                own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
                sides.append(CalibratedSide.of(own, prefix) if own else None)
            layers.append(_layer_of(sides[0], sides[1], index))
        return cls(tuple(layers), settings)

    def describe_calibration(self) -> str:
        made = self.settings
        rows = {
            "text": f"{made.tokens:,} tokens in {made.blocks:,} sequences of up to {made.block:,}",
            "bits by": ", ".join(f"{name} = {value}" for name, value in made.rule.items()),
            "memory": f"{self.bytes_ratio:.4f} of exact keys and values in 16 bits ({self.bytes_per_token:,} bytes per token)",
            "bits of a direction": ", ".join(map(str, made.widths)),
            "rotation": made.rotation,
            "metric": made.metric,
            "gamma": made.gamma,
        }
        facts = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        head = "| layer | directions of keys | of values | bits of a key | of a value | energy of keys | of values |"
        table = "\n".join(_card_row(index, layer) for index, layer in enumerate(self.layers) if layer is not None)
        return f"| | |\n|---|---|\n{facts}\n\n{head}\n|---|---|---|---|---|---|---|\n{table}\n\nEnergies are the shares kept."


def _layer_of(keys: CalibratedSide | None, values: CalibratedSide | None, index: int) -> CalibratedLayer | None:
    """A stored layer, if its sides fit each other."""
    if keys is None and values is None:
        return None
    if keys is None or values is None or len(keys.mean) != len(values.mean):
        raise ArtifactError(f"layers.{index}.*: keys and values don't fit each other. Calibrate anew.")
    return CalibratedLayer(keys, values)


def _card_row(index: int, layer: CalibratedLayer) -> str:
    directions = [", ".join(map(str, (side.widths > 0).sum(1).tolist())) for side in layer]
    bits = [f"{float(side.widths.float().mean()):.2f}" for side in layer]
    return f"| {index} | {' | '.join([*directions, *bits, *(f'{side.kept:.4f}' for side in layer)])} |"
