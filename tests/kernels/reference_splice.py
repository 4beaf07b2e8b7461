"""What `splice.py` does, written down plainly, with loops and in float64. Arguments are its."""

from collections.abc import Sequence
from itertools import product

import torch

from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.rotation import Layout, rotate_


def splice(
    packed: Packed,
    outs: Sequence[torch.Tensor],
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: Layout = "half",
) -> None:
    """Dequantizes, rotates and writes one token of one head at a time."""
    data, scale, zero, group = packed
    for layer, head, token in product(*map(range, data.shape[:3])):
        dim, dtype = outs[layer].shape[2], outs[layer].dtype
        stored = data[layer, head, token]
        if scale is None or zero is None:
            numbers = stored if stored.dtype == dtype and cos is None else stored.to(torch.float64, copy=True)
        else:
            if stored.dtype == torch.int8:
                levels = [int(level) + 127 for level in stored]
            else:
                levels = [int(stored[c // 2]) >> 4 if c % 2 else int(stored[c // 2]) & 15 for c in range(dim)]
            steps, lowest = (part[layer, head, token].double() for part in (scale, zero))
            groups = [c // (group or dim) for c in range(dim)]
            numbers = torch.tensor(levels, dtype=torch.float64, device=steps.device) * steps[groups] + lowest[groups]
        if cos is not None and sin is not None:
            rotate_(numbers, cos[token], sin[token], layout)
        if scale is not None and dtype == torch.float16:
            numbers = numbers.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        outs[layer][head, int(slots[token])] = numbers.to(dtype)
