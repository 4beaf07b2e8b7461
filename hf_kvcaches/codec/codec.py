"""`KVCodec`: a model's keys and values in few bits, calibrated once and kept as an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from hf_kvcaches.codec.calibrate import CodecSettings, calibrated
from hf_kvcaches.codec.fixed import FixedForm
from hf_kvcaches.codec.joint import PackedForm
from hf_kvcaches.codec.meter import Reading
from hf_kvcaches.codec.moments import EXACT, Maker, Metric, States
from hf_kvcaches.codec.packing import Span
from hf_kvcaches.codec.wire.messages import CodecHead, MessageReader, message_chunks
from hf_kvcaches.core.files import Artifact, checked_layers, markdown_table, part_of
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import fingerprint_of
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.rope import RotaryGeometry, undoable_rotation
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError, is_number
from hf_kvcaches.kernels.checksum import digest_of
from hf_kvcaches.stores.files import Source


@dataclass(frozen=True, eq=False, repr=False)
class KVCodec(Artifact, Maker):
    """Codes of a model's keys and values: bases in which errors cost alike, and bits where they count.

    One codec serves memory (`SubspaceCache`, slots of `EquipCache`), stores and the wire, from one calibration ("Online Subspace Projection
    for KV Caches", sections 4 and 10):

    - `packed`: keys and values of all heads of a layer have one basis, all coefficients of the model one step, and integers are entropy
      coded. It is for whatever is stored or sent.
    - `in_place`: codes of fixed widths that attention reads where they lie, in bases of up to 512 numbers. Keys are rotated from the first
      of 16 tokens to their own place, so that no key needs to be decoded: the query is rotated back instead, once for 16 tokens.
    - `slots`: codes of fixed widths with a basis for each head, whose keys and values come and go by themselves.

    **Departs from the paper**: bases are oblique and lose least where the model's predictions feel it (`metric="plain"` is the paper's);
    keys are projected before their rotation (`rotation="post"` is the paper's main text); keys and values share a basis, heads too; each
    direction has as many bits as are worth their bytes. The paper's ranks and its factor on logits are `AdaptiveSubspace`'s.

    Args:
        in_place: The form that attention reads.
        slots: The form of single heads.
        packed: The form at rest.
        settings: How it was made.
        layer_count: How many layers the model has, with those that are not coded (windows, linear attention).
        fingerprint: The model that it is for.
    """

    artifact_type: ClassVar[str] = "kv-codec"
    format_version: ClassVar[int] = 5

    in_place: FixedForm
    slots: FixedForm
    packed: PackedForm
    settings: CodecSettings
    layer_count: int
    fingerprint: ModelFingerprint | None = None

    @classmethod
    def calibrate(
        cls,
        model: nn.Module,
        tokenizer: Any,
        texts: Iterable[str | Sequence[int]],
        bytes_ratio: float = 0.125,
        *,
        rotation: Literal["aware", "post"] = "aware",
        metric: Metric = "loss",
        recent: int = 64,
        block: int = 512,
        batch_size: int = 1,
        max_tokens: int | None = None,
        shards: int = 1,
        progress: bool = True,
    ) -> KVCodec:
        """Measure a model on texts, in one pass: sums of outer products and a bounded sample, never all keys.

        The texts should be a mixture of what the model will read. The model is left as it was found. In several processes under
        `accelerate` each takes every n-th block, and all get the same codec. For other bits call `at`, which reads nothing again.

        Args:
            model: A transformers model, also inside a PEFT wrapper, that asks its attention by name.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids. A tokenizer's special tokens are added as usual.
            bytes_ratio: As for `at`.
            rotation: "aware": keys before the rotation, which is done anew on reading. "post": keys as they are cached.
            metric: "loss": errors count by what they do to the model's predictions, which takes a backward pass, through frozen and
                quantised models too; where there is none it is "plain", with a warning. "plain": by themselves.
            recent: With "loss", how many of the newest tokens are exact where codes are used: what tokens further away see of a key or
                value counts most (in a short sequence, further than half of it). 0 where none are exact.
            block: Texts are read in sequences of so many tokens, or what the model can read if that is less; memory grows with it.
            batch_size: Sequences at a time.
            max_tokens: Stop after so many; None reads all.
            shards: Among how many processes the heads will be shared under tensor parallelism; bases belong to one of these.
            progress: Whether to show a bar.
        """
        reading = Reading(rotation, metric, recent, block, batch_size, max_tokens, shards, progress)
        return cls(*calibrated(model, tokenizer, texts, _checked(bytes_ratio), reading))

    def at(self, bytes_ratio: float) -> KVCodec:
        """The codec with other bits, from what was measured when it was calibrated.

        Args:
            bytes_ratio: The bytes of a token's codes as a share of those of its exact keys and values in 16 bits, up to 1.5, with which
                nothing but rounding of float32 is lost. Bits go where they save most, over all layers, heads, keys and values together.
        """
        ratio = _checked(bytes_ratio)
        forms = {name: form.at(ratio) for name, form in self._forms.items()}
        return replace(self, **forms, settings=replace(self.settings, bytes_ratio=ratio))

    def of_heads(self, shard: HeadShard | None) -> KVCodec:
        """The codec of the heads that a process has under tensor parallelism; this one where it has all."""
        if shard is None:
            return self
        if (key := (shard.rank, shard.size)) not in self._made:
            self._made[key] = replace(self, **{name: form.of_heads(shard) for name, form in self._forms.items()})
        return self._made[key]

    @property
    def _forms(self) -> dict[str, Any]:
        return {"packed": self.packed, "in_place": self.in_place, "slots": self.slots}

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
        """Bytes of a token's codes in memory, in all layers that are coded."""
        return self.in_place.nbytes

    @property
    def bytes_ratio(self) -> float:
        """Those bytes as a share of exact keys and values in 16 bits."""
        return self.bytes_per_token / (2 * self.in_place.elements)

    @property
    def packed_ratio(self) -> float:
        """The bytes that the packed form of a text like those of the calibration takes, as a share of those in 16 bits."""
        return self.packed.ratio

    def pack(self, keys: Mapping[int, Tensor], values: Mapping[int, Tensor], left_out: int = 0) -> dict[int, Tensor]:
        """The packed form of tokens, by layer: (bytes,), uint8.

        Args:
            keys: By layer (kv_heads, tokens, head_dim), before rotation unless the codec was made with rotation="post".
            values: Like `keys`.
            left_out: First tokens that are kept elsewhere, and are coded as the mean.
        """
        return self.packed.pack({layer: (own, values[layer]) for layer, own in keys.items()}, left_out)

    def unpack(self, spans: Sequence[tuple[int, Tensor, int, int | None]], dtype: torch.dtype = torch.float32) -> list[States]:
        """Keys and values, (kv_heads, tokens, head_dim) each, of what `pack` returned; anything else is an `ArtifactError`.

        Args:
            spans: A layer, its record, and its tokens from a first to the one before a last (None: all). Records lie on one device.
        """
        return self.packed.unpack([Span(*span) for span in spans], dtype)

    @cached_property
    def digest(self) -> str:
        """A name of all that decides how codes are read."""
        return digest_of({"tensors": self.tensors(), "metadata": json.dumps(self.metadata(), sort_keys=True)})

    def has_codes(self, layer_idx: int) -> bool:
        """Whether a layer is coded."""
        return layer_idx in self.in_place.layers

    def encode(self, keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> list[list[Tensor] | None]:
        """The packed form of rows of tokens: for each layer a record of each row, (bytes,) uint8, or None where the layer is not coded.

        Args:
            keys: For each layer (batch, kv_heads, tokens, head_dim), before rotation unless the codec was made with rotation="post".
                Those of layers that are not coded are ignored.
            values: Like `keys`.
        """
        if len(keys) != self.layer_count or len(values) != self.layer_count:
            raise ConfigError.of("keys, values", f"one tensor for each of {self.layer_count} layers", (len(keys), len(values)))
        states: dict[int, States] = {}
        for layer in self.packed.bases:
            one, other = keys[layer], values[layer]
            if one is None or other is None or not one.ndim == other.ndim == 4:
                got = [None if side is None else tuple(side.shape) for side in (one, other)]
                raise ConfigError.of(f"keys and values of layer {layer}", "(batch, kv_heads, tokens, head_dim)", got)
            states[layer] = one, other
        if len(batches := {len(side) for pair in states.values() for side in pair}) > 1:
            raise ConfigError.of("keys, values", "as many rows in all layers", sorted(batches))
        rows = [self.packed.pack({layer: (one[row], other[row]) for layer, (one, other) in states.items()}) for row in range(*batches)]
        return [[records[index] for records in rows] if coded else None for index, coded in enumerate(self._coded)]

    def decode(self, codes: Sequence[Sequence[Tensor] | None], dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor] | None]:
        """Keys and values from what `encode` gave, for each layer (batch, kv_heads, tokens, head_dim), or None where it is not coded."""
        if len(codes) != self.layer_count:
            raise ConfigError.of("codes", f"records for each of {self.layer_count} layers", len(codes))
        spans = [(layer, record, 0, None) for layer, records in enumerate(codes) for record in records or ()]
        found = iter(self.unpack(spans, dtype))
        return [_stacked([next(found) for _ in records]) if records else None for records in codes]

    def to_bytes(self, codes: Sequence[Sequence[Tensor] | None]) -> bytes:
        """What `encode` gave as a message, which names this codec and is checked where it is read."""
        if [records is not None for records in codes] != self._coded:
            raise ConfigError.of("codes", "what this codec's encode gives", [records is not None for records in codes])
        head = CodecHead(self.digest, [None if records is None else list(map(len, records)) for records in codes])
        empty = torch.empty(0, dtype=torch.uint8)
        parts = (torch.cat([empty, *(record.cpu() for record in records)]) for records in codes if records is not None)
        return b"".join(message_chunks(head, parts))

    def from_bytes(self, data: Source) -> list[list[Tensor] | None]:
        """Codes from a message of `to_bytes`; anything else is an `ArtifactError`.

        Args:
            data: All of its bytes, whole or in pieces, or a function that returns between 1 and the given number of them, such as a
                connected socket's `recv`.
        """
        message = MessageReader(data, CodecHead)
        codec, layers = message.head.codec, message.head.layers
        if codec != self.digest:
            raise ArtifactError(f"These are codes of the codec {codec}, not of {self.digest}. Read them with that one.")
        if [lengths is not None for lengths in layers] != self._coded:
            raise ArtifactError("Codes are of other layers than those of the codec. Encode them anew.")
        parts = iter(list(message))
        try:
            return [None if lengths is None else list(next(parts).split(lengths)) for lengths in layers]
        except RuntimeError as error:
            raise ArtifactError(f"The records of codes have other lengths than their head says: {error}. Encode them anew.") from error

    @property
    def _coded(self) -> list[bool]:
        return [self.has_codes(index) for index in range(self.layer_count)]

    def encode_layers(self, config: PreTrainedConfig, layers: Mapping[int, States], padding: list[int]) -> dict[int, dict[str, Tensor]]:
        """What a saved cache has of layers: a record for each row, and the first tokens of all."""
        stored: dict[int, dict[str, Tensor]] = {layer: {} for layer in layers}
        for row, start in enumerate(padding):
            own = {layer: self.unrotated_keys(config, layer, keys[row : row + 1, :, start:])[0] for layer, (keys, _) in layers.items()}
            for layer, record in self.pack(own, {layer: values[row, :, start:] for layer, (_, values) in layers.items()}, EXACT).items():
                stored[layer][f"codes.{row}"] = record
        for layer, states in layers.items():
            for name, exact in zip(("first_keys", "first_values"), states, strict=True):
                rows = [side[:, start : start + EXACT] for side, start in zip(exact, padding, strict=True)]
                rows = [pad(side, (0, 0, 0, EXACT - side.shape[1])) for side in rows]
                stored[layer][name] = torch.stack(rows) if rows else exact[:, :, :0]
        return stored

    def decode_layers(self, config: PreTrainedConfig, stored: dict[int, dict[str, Tensor]], padding: list[int]) -> dict[int, States]:
        """The inverse of `encode_layers`."""
        found: dict[int, States] = {}
        for layer, tensors in stored.items():
            first, rows, geometry = (tensors["first_keys"], tensors["first_values"]), [], self.geometry(config, layer)
            if len(first[0]) != len(padding):
                raise ArtifactError(f"{len(first[0])} rows in a layer, and there are {len(padding)}")
            spans = [(layer, tensors[f"codes.{row}"], 0, None) for row in range(len(padding))]
            for row, (start, (keys, values)) in enumerate(zip(padding, self.unpack(spans, first[0].dtype), strict=True)):
                if geometry is not None:
                    keys = geometry.rotate(keys[None], torch.arange(keys.shape[1], device=keys.device))[0]
                for states, exact in ((keys, first[0][row]), (values, first[1][row])):
                    states[:, :EXACT] = exact[:, : states.shape[1]]
                rows.append((pad(keys, (0, 0, start, 0)), pad(values, (0, 0, start, 0))))
            found[layer] = _stacked(rows) if rows else first
        return found

    def require_all_layers(self, model: nn.Module, where: str) -> None:
        """Refuse a codec of another model, or one that leaves out layers, all of which are needed `where` the error says."""
        self.require_model(model)
        if missing := [index for index, coded in enumerate(self._coded) if not coded]:
            raise UnsupportedError(f"{where}: the codec has no codes for the layers {missing}, which attend to a window. Use 'int8'.")

    def require_model(self, model: nn.Module, tokenizer: Any = None) -> None:
        """Raise `FingerprintMismatch` if the codec was made for another model, or with another tokenizer than one that is passed."""
        if self.fingerprint is not None:
            self.fingerprint.require_model(fingerprint_of(model), "KVCodec", tokenizer)

    def geometry(self, config: PreTrainedConfig, layer_idx: int) -> RotaryGeometry | None:
        """How a layer rotates keys, which the codec takes before that; None where it takes them as they are cached."""
        return undoable_rotation(config, layer_idx, "codec", "Calibrate with rotation='post'.") if self.unrotated else None

    def unrotated_keys(self, config: PreTrainedConfig, layer_idx: int, keys: Tensor) -> Tensor:
        """What the codec takes of keys from position 0 on, (batch, kv_heads, tokens, head_dim)."""
        geometry, positions = self.geometry(config, layer_idx), torch.arange(keys.shape[2], device=keys.device)
        return keys if geometry is None else geometry.unrotate(keys.float(), positions)

    def __repr__(self) -> str:
        made, layers = self.settings, f"{len(self.in_place.layers)} of {self.layer_count} layers"
        kinds = f"rotation={made.rotation!r}, metric={made.metric!r}, recent={made.recent}"
        return f"KVCodec({layers}, {self.bytes_ratio:.4f} of the bytes, {kinds}, model {self.fingerprint})"

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.{part}": tensor for name, form in self._forms.items() for part, tensor in form.tensors().items()}

    def metadata(self) -> dict[str, Any]:
        forms = {name: form.metadata() for name, form in self._forms.items()}
        return {"layers": self.layer_count, "settings": asdict(self.settings), **forms}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Self:
        in_place, slots = (FixedForm.restore(part_of(tensors, form), metadata[form]) for form in ("in_place", "slots"))
        packed, count = PackedForm.restore(part_of(tensors, "packed"), metadata["packed"]), checked_layers(metadata["layers"])
        layers = [list(form) for form in (packed.bases, in_place.layers, slots.layers)]
        if not layers[0] == layers[1] == layers[2] or not all(0 <= index < count for index in layers[0]):
            raise ArtifactError(f"The forms of a codec have the layers {layers} of {count}. Calibrate anew.")
        return cls(in_place, slots, packed, CodecSettings(**metadata["settings"]), count)

    def describe_calibration(self) -> str:
        made, packed = self.settings, f"{self.packed_ratio:.4f}"
        memory = f"{self.bytes_ratio:.4f} of exact keys and values in 16 bits ({self.bytes_per_token:,} bytes per token)"
        if made.metric == "loss":
            memory += f", with an expected divergence of {self.in_place.divergence:.4f} nats"
            packed += f", with an expected divergence of {self.packed.divergence:.4f} nats"
        facts = {
            "text": f"{made.tokens:,} tokens in {made.blocks:,} sequences of up to {made.block:,}",
            "share of the bytes": f"{made.bytes_ratio:g}",
            "memory": memory,
            "packed": packed,
            "rotation": made.rotation,
            "metric": made.metric,
            "exact newest tokens": made.recent,
        }
        return markdown_table([{"fact": name, "value": value} for name, value in facts.items()])


def _checked(bytes_ratio: Any) -> float:
    """Refuse what is no share of the bytes; with the most, every direction has 24 bits."""
    if not is_number(bytes_ratio) or not 0 < bytes_ratio <= 1.5:
        raise ConfigError.of("bytes_ratio", "a number above 0 and up to 1.5", bytes_ratio, "It is a share of the bytes. Try 0.125.")
    return float(bytes_ratio)


def _stacked(rows: Sequence[States]) -> States:
    keys, values = (torch.stack(side) for side in zip(*rows, strict=True))
    return keys, values
