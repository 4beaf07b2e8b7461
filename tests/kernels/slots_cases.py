"""Cases for all back-ends of `slots.py`: awkward sizes, every option, and unreadable numbers wherever nobody may look."""

from typing import Any

import torch

from hf_kvcaches.kernels.arguments import RotationTables
from tests.kernels.cases import NAN, Draws

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2, torch.float16: 6e-3}


class Case(Draws):
    """Random tensors of one shape, with `poison` in keys and values of invalid slots: NaN, where the back-end promises not to look."""

    def __init__(self, batch=2, kv_heads=2, group=2, slots=9, dim=8, value_dim=8, dtype=torch.float32, seed=0, poison=0.0) -> None:
        super().__init__(batch, kv_heads, slots, dtype, seed)
        self.query = self.randn(batch, kv_heads * group, 1, dim)
        self.keys, self.values = self.randn(*self.shape, dim) * 2, self.randn(*self.shape, value_dim)
        self.valid = self.some()
        self.keys[~self.valid], self.values[~self.valid] = poison, poison

    def options(
        self, valid: bool, turn: str, softcap: float | None = None, want_weights: bool = True, sinks: bool = False
    ) -> dict[str, Any]:
        """Keyword arguments: `turn` is "", "half" or "interleaved"."""
        slots, dim = self.shape[2], self.keys.shape[3]
        given: dict[str, Any] = {"softcap": softcap, "want_weights": want_weights, "valid": self.valid if valid else None}
        if sinks:
            given["sink_logits"] = self.randn(self.query.shape[1]) * 2
        if turn and dim > 1:
            angles = torch.rand((40, max(1, dim // 3)), generator=self.generator, dtype=torch.float64) * 6
            precision = torch.promote_types(self.dtype, torch.float32)
            positions = torch.randint(0, 40, (self.shape[0], 1, slots), generator=self.generator)
            if valid:
                positions = torch.where(self.valid, positions, -1)
            given["rotation"] = RotationTables(positions, angles.cos().to(precision), angles.sin().to(precision), turn)  # type: ignore[arg-type]
        return given

    def paged(self, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Key and value pages full of NaN but for valid slots, tables, and validity: the first row has no page for its last block."""
        (batch, kv_heads), blocks = self.shape[:2], -(-self.shape[2] // page)
        tables = torch.randperm(batch * blocks + 3, generator=self.generator)[: batch * blocks].view(batch, blocks).to(torch.int32)
        tables[0, -1] = -1
        valid = self.valid.clone()
        valid[0, :, (blocks - 1) * page :] = False
        pages = []
        for flat in (self.keys, self.values):
            pool = torch.full((batch * blocks + 3, kv_heads, page, flat.shape[-1]), NAN, dtype=self.dtype)
            for b, h, s in valid.nonzero().tolist():
                pool[tables[b, s // page], h, s % page] = flat[b, h, s]
            pages.append(pool)
        return pages[0], pages[1], tables, valid


def assert_same(got: Any, expected: Any, dtype: torch.dtype) -> None:
    """Outputs agree to the dtype's tolerance; weights, where there are any, likewise."""
    assert got[0].shape == expected[0].shape
    assert got[0].dtype == dtype
    assert (got[1] is None) == (expected[1] is None)
    for one, other in zip(got, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one.cpu().double(), other.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if got[1] is not None:
        assert got[1].dtype == torch.float32


def write_arguments(case: Case, tokens: int, shared: bool = False) -> list[torch.Tensor]:
    """Slots, new keys and new values, for writing into the case's buffers."""
    batch, kv_heads, slots = (1, 1, case.shape[2]) if shared else case.shape
    where = torch.stack([torch.randperm(slots, generator=case.generator)[:tokens] for _ in range(batch * kv_heads)])
    new = [case.randn(*case.shape[:2], tokens, buffer.shape[-1]) for buffer in (case.keys, case.values)]
    return [where.view(batch, kv_heads, tokens), *new]
