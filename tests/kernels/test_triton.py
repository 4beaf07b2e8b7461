"""The Triton kernels run under Triton's interpreter (on a GPU where there is one), and compile ahead of time."""

import pytest

from tests.kernels.triton_process import HERE, SHARED_MEMORY, assert_passes, run

pytest.importorskip("triton")
pytestmark = pytest.mark.full

# What is launched, by the functions of `launched.py`.
LAUNCHED = {
    "codes": {"score_kernel", "value_kernel", "combine_kernel"},
    "rans": {"rans_kernel"},
    "slots": {"attend_kernel", "combine_kernel", "write_kernel"},
    "splice": {"splice_kernel"},
}


@pytest.mark.parametrize("tests", ["test_codes.py", "rans_on_triton.py", "test_slots.py", "test_splice.py"])
def test_a_kernel_equals_its_reference(tests: str) -> None:
    assert_passes(tests)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_kernel_compiles_ahead_of_time_and_fits(name: str, capability: int) -> None:
    assert set(run(str(HERE / "launched.py"), name, str(capability), interpret=False).split()) == LAUNCHED[name]
