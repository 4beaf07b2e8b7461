"""What docs/segments.md says of options and its picture is so."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from xml.dom import minidom

from hf_kvcaches import SegmentPolicy

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "segments.md").read_text(encoding="utf-8")


def test_a_policy_has_the_defaults_that_the_guide_names():
    table = GUIDE.partition("| Option |")[2].partition("## ")[0]
    named = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.MULTILINE))
    policy = SegmentPolicy()
    assert named == {name: str(getattr(policy, name)) for name in named}
    assert set(named) == {field.name for field in fields(policy)} - {"bound", "measured", "fingerprint"}


def test_the_picture_of_the_guide_can_be_read():
    minidom.parse(str(DOCS / "images" / "segments-splice.svg"))
