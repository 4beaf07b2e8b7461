"""No architecture of transformers gets a wrong answer or a raw error from any cache: what it gives is equal, or refused with a reason."""

from __future__ import annotations

import pytest
from transformers.models.auto import modeling_auto

from tests.families.models import families, special
from tests.families.outcomes import outcomes

RUNNING = [family for family in families() if family.name not in special.LEFT_OUT]


@pytest.mark.full
@pytest.mark.parametrize("family", RUNNING, ids=lambda family: family.name)
def test_every_cache_is_equal_or_refused_with_a_reason(family):
    failures = [f"{o.cache}, {o.scenario}: {o.verdict}: {o.detail}" for o in outcomes(family) if o.fails]
    assert not failures, "\n".join(failures)


@pytest.mark.full
def test_only_architectures_that_exist_are_left_out():
    assert special.LEFT_OUT.keys() <= {family.name for family in families()}


@pytest.mark.full
def test_nearly_all_architectures_run():
    known = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert len({family.model_type for family in RUNNING}) > 0.85 * len(known)
