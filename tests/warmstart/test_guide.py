"""The defaults that docs/warmstart.md names are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from hf_kvcaches import WarmStartGate, WarmStartLibrary

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "warmstart.md").read_text(encoding="utf-8")


def test_the_gate_has_the_defaults_that_the_guide_names():
    names = ("reusable", "tau", "similarity", "repair", "repair_depth")
    rows = dict(re.findall(rf"^\| `({'|'.join(names)})` \| ([^|]+?) \|", GUIDE, flags=re.MULTILINE))
    assert rows == {name: str(getattr(WarmStartGate(), name)) for name in names}


def test_the_library_has_the_defaults_that_the_guide_names():
    defaults = {name: p.default for name, p in inspect.signature(WarmStartLibrary).parameters.items()}
    rows = re.findall(r"^\| `(encoder|quantization|location|max_bytes)` \| `?\"?([^|`\"]+?)\"?`? \|", GUIDE, flags=re.MULTILINE)
    assert dict(rows).pop("encoder") == "tokens"
    assert {name: value for name, value in rows if name != "encoder"} == {
        name: str(defaults[name]) for name in ("quantization", "location", "max_bytes")
    }
