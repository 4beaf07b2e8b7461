"""Refusing arguments of kernels that don't fit together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvcaches.errors import ConfigError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: Sequence[int | tuple[int, ...] | None],
    dtype: torch.dtype | Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
    *,
    contiguous: bool = False,
) -> None:
    """Refuses a tensor of another shape, dtype or device.

    Args:
        shape: The size of each dimension; None for any, a tuple for one of several.
        device: None for any.
        contiguous: Whether the last dimension must be.
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    sizes = [size if isinstance(size, tuple) else (size,) for size in shape]
    fits = x.ndim == len(sizes) and all(size == (None,) or have in size for have, size in zip(x.shape, sizes, strict=True))
    if not fits or x.dtype not in dtypes:
        listed = ", ".join(" or ".join("any" if one is None else str(one) for one in dict.fromkeys(size)) for size in sizes)
        kinds = " or ".join(str(kind).removeprefix("torch.") for kind in dtypes)
        raise ConfigError.of(name, f"{kinds} of shape ({listed})", (x.dtype, tuple(x.shape)))
    if device is not None and x.device != device:
        raise ConfigError.of(name, f"a tensor on {device}", str(x.device))
    if contiguous and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ConfigError.of(name, "a contiguous last dimension", x.stride(), "Call .contiguous() on it.")


def check_mask(name: str, mask: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype | Sequence[torch.dtype] = torch.bool) -> None:
    """Refuses what is not one number for each (batch or 1, kv_heads or 1, slots or tokens)."""
    batch, heads, count = shape
    check_tensor(name, mask, ((1, batch), (1, heads), count), dtype)


def check_query(query: torch.Tensor, batch: int, kv_heads: int, dim: int, dtype: torch.dtype | Sequence[torch.dtype] = FLOATS) -> None:
    """Refuses a query that is not one token a row, with the same number of heads for each KV head."""
    if query.ndim == 4 and (query.shape[1] % kv_heads or not query.shape[1]):
        raise ConfigError.of("query", f"a multiple of {kv_heads} heads", query.shape[1])
    check_tensor("query", query, (batch, None, 1, dim), dtype)


def check_layout(name: str, layout: str) -> None:
    """Refuses what is no layout."""
    if layout not in ("half", "interleaved"):
        raise ConfigError.of(name, "'half' or 'interleaved'", layout)


def check_tables(cos: torch.Tensor | None, sin: torch.Tensor | None, layout: str, tokens: int, dim: int, device: torch.device) -> None:
    """Refuses cosines and sines that are not those of each token's pairs, (tokens, rotary_dim / 2), or both None."""
    check_layout("layout", layout)
    if cos is None or sin is None:
        if cos is not sin:
            raise ConfigError.of("cos and sin", "both or neither", (type(cos).__name__, type(sin).__name__))
        return
    check_tensor("cos", cos, (tokens, None), (torch.float32, torch.float64), device)
    if not 0 < 2 * cos.shape[1] <= dim:
        raise ConfigError.of("cos", f"one to {dim // 2} pairs", cos.shape[1])
    check_tensor("sin", sin, cos.shape, cos.dtype, device)


def check_quantized(
    name: str,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    group: int | None,
    shape: Sequence[int | None],
    device: torch.device,
    *,
    contiguous: bool = False,
) -> None:
    """Refuses parts that `dequantize` could not make numbers of this shape of, or a scale or zero beside plain numbers."""
    *others, length = shape
    assert length is not None
    if group is not None and (type(group) is not int or group <= 0):
        raise ConfigError.of(f"{name}.group", "a number of elements above 0, or None", group)
    width = -(-length // 2) if data.dtype == torch.uint8 else length
    check_tensor(f"{name}.data", data, (*others, width), (torch.int8, torch.uint8, *FLOATS), device, contiguous=contiguous)
    plain = data.is_floating_point()
    for part_name, part in (("scale", scale), ("zero", zero)):
        if (part is None) != plain:
            wanted = "None" if plain else "a tensor"
            raise ConfigError.of(f"{name}.{part_name}", f"{wanted} for data in {data.dtype}", type(part).__name__)
        if part is not None:
            groups = -(-length // (group or max(length, 1)))
            check_tensor(f"{name}.{part_name}", part, (*data.shape[:-1], groups), FLOATS, device, contiguous=contiguous)
