"""The Triton kernels run under Triton's interpreter (on a GPU where there is one), and compile ahead of time."""

import pytest

pytest.importorskip("triton")

from tests.kernels.kernel_variants import KERNELS
from tests.kernels.triton_process import SHARED_MEMORY, assert_compiles, assert_passes

pytestmark = pytest.mark.full


@pytest.mark.parametrize("tests", ["test_codes.py", "rans_on_triton.py", "test_slots.py", "test_splice.py"])
def test_a_kernel_equals_its_reference(tests: str) -> None:
    assert_passes(tests)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_ahead_of_time_and_fits(name: str, capability: int) -> None:
    assert_compiles("kernel_variants.py", name, capability)
