"""`KVCodec`: a model's keys and values in few bits, calibrated once and kept as an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_kvcaches.codec import allocation, saved_cache
from hf_kvcaches.codec.calibrate import Measurements, Reading, measure
from hf_kvcaches.codec.coder import LayerCoder
from hf_kvcaches.codec.fit import fit_layer, joint_basis
from hf_kvcaches.codec.joint import PackedForm
from hf_kvcaches.codec.layout import packed_bytes
from hf_kvcaches.codec.metric import Metric
from hf_kvcaches.codec.packing import Span
from hf_kvcaches.codec.settings import CodecSettings
from hf_kvcaches.codec.sides import EXACT, CalibratedLayer
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

# What the packed form can take: beyond, integers would have more than 16 bits.
_LEAST_RATIO, _LARGEST_RATIO = 0.005, 0.75


@dataclass(frozen=True, eq=False, repr=False)
class KVCodec(Artifact):
    """Codes of a model's keys and values: a basis for each head in which errors cost alike, and bits where they count.

    One codec serves memory (`SubspaceCache`), stores and the wire, in two forms. In memory codes have fixed widths and are read where they
    lie. At rest (`pack`) keys and values of all heads of a layer have one basis, all coefficients of the model one step, and integers are
    entropy coded: a tenth of the divergence at the same bytes. Keys are coded before their rotation, so that codes do not depend on
    positions. Nothing is stored for a group of tokens besides its codes: steps and means are calibrated.

    "Online Subspace Projection for KV Caches", the static method of sections 4 and 10, is `at(rank=..., widths=16)`.

    **Departs from the paper**: bases are oblique and lose least where the model's predictions feel it (`metric="plain"` is the paper's);
    keys are projected before the rotation (`rotation="post"` is the paper's main text); each direction has as many bits as are worth
    their bytes, over all layers, heads, keys and values together. `gamma="paper"` is the paper's factor of `sqrt(r / d)` on logits.

    Args:
        layers: For each layer of the model its transforms and bits, or None where a method leaves it alone (windows, linear attention).
        settings: How it was made.
        packed: The form at rest.
        fingerprint: The model that it is for.
    """

    artifact_type: ClassVar[str] = "kv-codec"
    format_version: ClassVar[int] = 3

    layers: tuple[CalibratedLayer | None, ...]
    settings: CodecSettings
    packed: PackedForm
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
        recent: int = 0,
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
                quantised models too; where there is none it is "plain", with a warning. "plain": by the error of keys and values
                themselves.
            recent: With "loss", how many of the newest tokens are always exact where codes are used: only what tokens further away see of a
                key or value counts (in a short sequence, further than half of it). Such a codec is of little use where none are exact.
            block: Texts are read in sequences of so many tokens, or what the model can read if that is less.
            batch_size: Sequences at a time.
            max_tokens: Stop after so many; None reads all.
            progress: Whether to show a bar.
        """
        if bytes_ratio is None and rank is None and energy is None:
            bytes_ratio = 0.125
        choice = allocation.BitRule.of(bytes_ratio, rank, energy, widths)
        require_choice("gamma", gamma, ("one", "paper"))
        measured = measure(model, tokenizer, texts, Reading(rotation, metric, recent, block, batch_size, max_tokens, progress))
        fingerprint = ModelFingerprint.of(model, tokenizer if measured.used_tokenizer else None)
        return cls._fitted(measured, choice, gamma, fingerprint)

    @classmethod
    def _fitted(cls, measured: Measurements, choice: allocation.BitRule, gamma: Any, fingerprint: ModelFingerprint) -> KVCodec:
        reading = measured.reading
        with torch.no_grad():
            fitted = {index: fit_layer(sums, reading.metric) for index, sums in sorted(measured.sums.items())}
            bases = {index: joint_basis(sums, reading.metric) for index, sums in sorted(measured.sums.items())}
        layers = choice.allot(list(fitted.values()))
        named, read = dict(zip(fitted, layers, strict=True)), (reading.block, measured.blocks, measured.tokens)
        settings = CodecSettings(reading.rotation, reading.metric, reading.recent, choice.rule, choice.widths, gamma, *read)
        chosen = tuple(named.get(index) for index in range(measured.layers))
        return cls(chosen, settings, PackedForm.fit(bases, _ratio(layers)), fingerprint)

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
        allotted = choice.allot([layer for layer in self.layers if layer is not None])
        chosen = iter(allotted)
        layers = tuple(None if layer is None else next(chosen) for layer in self.layers)
        settings = replace(self.settings, rule=choice.rule, widths=choice.widths)
        return KVCodec(layers, settings, PackedForm.fit(self.packed.bases, _ratio(allotted)), self.fingerprint)

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

    @property
    def packed_ratio(self) -> float:
        """The bytes that the packed form of a text like those of the calibration takes, as a share of those in 16 bits."""
        return self.packed.ratio

    def pack(self, keys: Mapping[int, torch.Tensor], values: Mapping[int, torch.Tensor], left_out: int = 0) -> dict[int, torch.Tensor]:
        """The packed form of tokens, by layer: (bytes,), uint8.

        Args:
            keys: By layer (kv_heads, tokens, head_dim), before rotation unless the codec was made with rotation="post".
            values: Like `keys`.
            left_out: First tokens that are kept elsewhere, and are coded as the mean.
        """
        states = {layer: (own, values[layer]) for layer, own in keys.items()}
        for layer, pair in states.items():
            basis, got = self.packed.bases.get(layer), [tuple(each.shape) for each in pair]
            if basis is None or got != [(basis.shape.heads, pair[0].shape[1], dim) for dim in basis.shape[1:]]:
                expected = (
                    f"a layer of {sorted(self.packed.bases)}" if basis is None else f"keys and values of {basis.shape}, of the same tokens"
                )
                raise ConfigError.of(f"layer {layer}", expected, got)
        return self.packed.pack(states, left_out)

    def unpack(
        self, spans: Sequence[tuple[int, torch.Tensor, int, int | None]], dtype: torch.dtype = torch.float32
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values, (kv_heads, tokens, head_dim) each, of what `pack` returned; anything else is an `ArtifactError`.

        Args:
            spans: A layer, its record, and which of its tokens, from the first to the one behind the last (None: all). Records lie on
                one device. Many at a time take little longer than one.
            dtype: Of the result.
        """
        return self.packed.unpack([Span(*span) for span in spans], dtype)

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

    def encode(self, keys: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor] | None]:
        """The packed form of rows of tokens: for each layer a record of each row, (bytes,) uint8, or None where the layer is not coded.

        Args:
            keys: For each layer (batch, kv_heads, tokens, head_dim), before rotation unless the codec was made with rotation="post".
                Those of layers that are not coded are ignored.
            values: Like `keys`.
        """
        if len(keys) != len(self.layers) or len(values) != len(self.layers):
            raise ConfigError.of("keys, values", f"one tensor for each of {len(self.layers)} layers", (len(keys), len(values)))
        sides: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = {}, {}
        for layer in self.packed.bases:
            for name, given, side in zip(("keys", "values"), (keys, values), sides, strict=True):
                if (states := given[layer]) is None or states.ndim != 4:
                    raise ConfigError.of(
                        f"{name}[{layer}]", "(batch, kv_heads, tokens, head_dim)", None if states is None else states.shape
                    )
                side[layer] = states
        batches = {len(states) for side in sides for states in side.values()}
        if len(batches) > 1:
            raise ConfigError.of("keys, values", "as many rows in all layers", sorted(batches))
        rows = []
        for row in range(*batches):
            keys_of, values_of = ({layer: states[row] for layer, states in side.items()} for side in sides)
            rows.append(self.pack(keys_of, values_of))
        return [[records[index] for records in rows] if layer is not None else None for index, layer in enumerate(self.layers)]

    def decode(
        self, codes: Sequence[Sequence[torch.Tensor] | None], dtype: torch.dtype = torch.float32
    ) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Keys and values from what `encode` gave, for each layer (batch, kv_heads, tokens, head_dim), or None where it is not coded.

        Args:
            dtype: Of the result.
        """
        if len(codes) != len(self.layers):
            raise ConfigError.of("codes", f"records for each of {len(self.layers)} layers", len(codes))
        spans = [(layer, record, 0, None) for layer, records in enumerate(codes) for record in records or ()]
        found = iter(self.unpack(spans, dtype))
        rows = [None if records is None else [next(found) for _ in records] for records in codes]
        return [
            None if not states else (torch.stack([own[0] for own in states]), torch.stack([own[1] for own in states])) for states in rows
        ]

    def to_bytes(self, codes: Sequence[Sequence[torch.Tensor] | None]) -> bytes:
        """What `encode` gave as a message, which names this codec and is checked where it is read."""
        if [records is None for records in codes] != [layer is None for layer in self.layers]:
            raise ConfigError.of("codes", "what this codec's encode gives", [records is not None for records in codes])
        return b"".join(wire.written(self.digest, codes))

    def from_bytes(self, data: Source) -> list[list[torch.Tensor] | None]:
        """Codes from a message of `to_bytes`; anything else is an `ArtifactError`.

        Args:
            data: All of its bytes, whole or in pieces, or a function that returns between 1 and the given number of them, such as a
                connected socket's `recv`.
        """
        return wire.read(data, self.digest, [layer is not None for layer in self.layers])

    def encode_layers(self, config: PreTrainedConfig, layers: Mapping[int, saved_cache.States], padding: list[int]) -> saved_cache.Stored:
        """What a saved cache has of layers' exact keys and values; see `CacheCodec`."""
        return saved_cache.encode(self, config, layers, padding)

    def decode_layers(self, config: PreTrainedConfig, stored: saved_cache.Stored, padding: list[int]) -> dict[int, saved_cache.States]:
        """The inverse of `encode_layers`."""
        return saved_cache.decode(self, config, stored, padding)

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
        found = {f"packed.{name}": tensor for name, tensor in self.packed.tensors().items()}
        for index, layer in enumerate(self.layers):
            if layer is not None:
                found |= {f"layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
        return found

    def metadata(self) -> dict[str, Any]:
        return {"layers": len(self.layers), "settings": self.settings.to_dict(), "packed": self.packed.metadata()}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        layers = tuple(CalibratedLayer.of(tensors, f"layers.{index}.") for index in range(checked_layers(metadata["layers"])))
        own = {name.removeprefix("packed."): tensor for name, tensor in tensors.items() if name.startswith("packed.")}
        packed = PackedForm.restore(own, metadata["packed"])
        if sorted(packed.bases) != [index for index, layer in enumerate(layers) if layer is not None]:
            raise ArtifactError("packed.*: its layers are others than those of the codes in memory. Calibrate anew.")
        return cls(layers, CodecSettings.from_dict(metadata["settings"]), packed)

    def describe_calibration(self) -> str:
        memory = f"{self.bytes_ratio:.4f} of exact keys and values in 16 bits ({self.bytes_per_token:,} bytes per token)"
        packed = f"{self.packed_ratio:.4f}, with an expected divergence of {self.packed.divergence:.4f} nats"
        return self.settings.card(self.layers, memory, packed)


def _ratio(layers: Sequence[CalibratedLayer]) -> float:
    """The bytes of codes in memory as a share of those in 16 bits; the packed form takes as many, up to a limit."""
    share = sum(packed_bytes(side.widths) for layer in layers for side in layer) / (2 * sum(layer.elements for layer in layers))
    return min(max(share, _LEAST_RATIO), _LARGEST_RATIO)
