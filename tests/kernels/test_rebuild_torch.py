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


@pytest.mark.parametrize("shared", [False, True])
def test_products_in_bfloat16_are_rounded_once_each_and_summed_up_in_float32(shared: bool) -> None:
    random = torch.Generator().manual_seed(5)
    side, codes, *weights = (torch.randn(shape, generator=random) for shape in ((9, 6), (20, 5), (6, 16), (5, 16), (16,)))
    rows = torch.arange(20) % 9
    decoder = Decoder(*weights)
    given = (side, {"side_rows": rows}) if shared else (side[rows], {})
    outs = [torch.zeros(1, 2, 20, 4) for _ in "kv"]
    rebuild(given[0], codes, decoder, *outs, [RowSpan(0, 0, 20)], product=torch.bfloat16, **given[1])
    products = [(x.bfloat16() @ part.bfloat16()).float() for x, part in ((side[rows], weights[0]), (codes, weights[1]))]
    expected = (products[0] + products[1] + weights[2]).unflatten(1, (2, 2, 4)).permute(1, 2, 0, 3)
    torch.testing.assert_close(torch.stack(outs)[:, 0], expected, rtol=1e-2, atol=1e-2)
    exact = (side[rows] @ weights[0] + codes @ weights[1] + weights[2]).unflatten(1, (2, 2, 4)).permute(1, 2, 0, 3)
    assert 0 < float((torch.stack(outs)[:, 0] - exact).norm()) < 2**-7 * float(exact.norm())


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
