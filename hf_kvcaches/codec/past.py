"""How the codes of a `KVCodec` are read by `evaluate.past.read_rows`, in memory and in the packed form."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.errors import require_instance
from hf_kvcaches.evaluate.past import PastCoding
from hf_kvcaches.kernels.code_format import TILE


class CodecCoding(PastCoding):
    """The codes of a `KVCodec` in memory, as a `SubspaceCache` with the same codec, sinks and recent tokens reads them.

    Args:
        codec: Calibrated for the model.
        model: The model.
    """

    tile = TILE

    def __init__(self, codec: KVCodec, model: Any, *, sinks: int = 4, recent: int = 0) -> None:
        super().__init__(sinks, recent)
        require_instance("codec", codec, KVCodec, {"model": model}, "KVCodec.calibrate makes one for a model.")
        codec.require_model(model)
        self.codec, self.config = codec, compat.decoder_config(compat.base_model(model).config)

    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        geometry, positions = self.codec.geometry(self.config, layer_idx), torch.arange(keys.shape[2], device=keys.device)
        coder = self.codec.in_place.coder(layer_idx, keys.dtype, keys.device)
        # Of the first token of each tile; those of the sinks are exact.
        starts = positions - (positions - self.sinks) % TILE
        wide = keys if keys.dtype == torch.float64 else keys.float()
        codes = coder.encode(keys if geometry is None else geometry.unrotate(wide, starts), values)
        decoded_keys, decoded_values = coder.decode(codes, keys.dtype)
        return decoded_keys if geometry is None else geometry.rotate(decoded_keys, starts), decoded_values


class PackedCoding(CodecCoding):
    """The packed form of a `KVCodec`, as stores keep it.

    Attributes:
        nbytes: Of all that was read, first tokens left out; they are kept exactly elsewhere.
    """

    tile = 1
    nbytes = 0

    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        geometry, plain = self.codec.geometry(self.config, layer_idx), self.codec.unrotated_keys(self.config, layer_idx, keys)
        rows = zip(plain, values, strict=True)
        records = [self.codec.pack({layer_idx: own}, {layer_idx: value}, self.sinks)[layer_idx] for own, value in rows]
        self.nbytes += sum(map(len, records))
        decoded = self.codec.unpack([(layer_idx, record, 0, None) for record in records], keys.dtype)
        read_keys, read_values = (torch.stack(side) for side in zip(*decoded, strict=True))
        positions = torch.arange(keys.shape[2], device=keys.device)
        return read_keys if geometry is None else geometry.rotate(read_keys, positions), read_values
