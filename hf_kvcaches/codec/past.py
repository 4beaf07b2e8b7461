"""What is read of a codec's codes, for measures of quality."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.errors import require_instance
from hf_kvcaches.evaluate.past import PastCoding


class CodecCoding(PastCoding):
    """The codes of a `KVCodec`, as a `SubspaceCache` with the same codec, sinks and recent tokens reads them.

    Args:
        codec: Calibrated for the model.
        model: The model.
    """

    def __init__(self, codec: KVCodec, model: Any, *, sinks: int = 4, recent: int = 0) -> None:
        super().__init__(sinks, recent)
        require_instance("codec", codec, KVCodec, {"model": model}, "KVCodec.calibrate makes one for a model.")
        codec.require_model(model)
        self.codec, self.config = codec, compat.decoder_config(compat.base_model(model).config)

    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        geometry, positions = self.codec.geometry(self.config, layer_idx), torch.arange(keys.shape[2], device=keys.device)
        coder = self.codec.coder(layer_idx, keys.dtype, keys.device)
        wide = keys if keys.dtype == torch.float64 else keys.float()
        codes = coder.encode(keys if geometry is None else geometry.unrotate(wide, positions), values)
        decoded_keys, decoded_values = coder.decode(codes)
        return decoded_keys if geometry is None else geometry.rotate(decoded_keys, positions), decoded_values
