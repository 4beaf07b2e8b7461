"""No architecture of transformers gets a wrong answer or a raw error from any cache: what it gives is equal, or refused with a reason.

FAMILY_RESULTS names a file that outcomes are added to, as JSON lines; `scripts/family_table.py` makes the table of docs/families.md of it.
"""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from transformers.models.auto import modeling_auto

from tests.families.models import families, special
from tests.families.outcomes import Outcome, outcomes

RUNNING = [family for family in families() if family.name not in special.LEFT_OUT]


def record(found: Iterable[Outcome]) -> None:
    if path := os.environ.get("FAMILY_RESULTS"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:  # one write, as several processes may add to it
            file.write("".join(json.dumps(dataclasses.asdict(outcome)) + "\n" for outcome in found))


@pytest.mark.full
@pytest.mark.parametrize("family", RUNNING, ids=lambda family: family.name)
def test_every_cache_is_equal_or_refused_with_a_reason(family):
    found = outcomes(family)
    record(found)
    failures = [f"{o.cache}, {o.scenario}: {o.verdict}: {o.detail}" for o in found if o.fails]
    assert not failures, "\n".join(failures)


@pytest.mark.full
def test_only_architectures_that_exist_are_left_out():
    record(Outcome(name, "", "", "left out", reason) for name, reason in special.LEFT_OUT.items())
    assert special.LEFT_OUT.keys() <= {family.name for family in families()}


@pytest.mark.full
def test_nearly_all_architectures_run():
    known = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert len({family.model_type for family in RUNNING}) > 0.85 * len(known)
