"""Rebuilding in PyTorch: roundings, gradients, and where Triton is refused."""

import pytest
import torch

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.arguments import Decoder, RowSpan
from hf_kvcaches.kernels.rebuild import rebuild
from tests.kernels.rebuild_cases import Case, assert_written


def test_half_precision_is_rounded_once() -> None:
    """2^-8 from the side, and as much from the codes, make a step of bfloat16 above 1, which either alone does not."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    decoder = Decoder(torch.full((1, 2), 2**-8, dtype=torch.bfloat16), torch.full((1, 2), 2**-8, dtype=torch.bfloat16), one[0].expand(2))
    outs = [torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16) for _ in "kv"]
    rebuild(one, one, decoder, *outs, [RowSpan(0, 0, 1)])
    assert [out.item() for out in outs] == [1 + 2**-7] * 2


def test_weights_that_learn_leave_no_gradient() -> None:
    case = Case()
    decoder = Decoder(*(part.requires_grad_() for part in case.decoder if part is not None))
    rebuild(case.side, case.codes, decoder, *case.outs, case.spans)
    assert not any(out.requires_grad for out in case.outs)
    case.decoder = Decoder(*(part.detach() for part in decoder if part is not None))
    assert_written(case, case.outs)


def test_triton_is_refused_where_it_cannot_run() -> None:
    pytest.importorskip("triton")
    case, fine = Case(), Case(dtype=torch.float64)
    with pytest.raises(ConfigError, match="'torch' for tensors that are not on a CUDA device"):
        rebuild(*case.arguments(), *case.outs, case.spans, backend="triton")
    with pytest.raises(UnsupportedError, match="no gradients and no float64"):
        rebuild(*fine.arguments(), *fine.outs, fine.spans, backend="triton")
