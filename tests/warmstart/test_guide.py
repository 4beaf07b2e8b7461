"""The defaults that docs/warmstart.md names are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from hf_kvcaches import WarmStartGate, WarmStartLibrary

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "warmstart.md").read_text(encoding="utf-8")


def test_the_gate_has_the_defaults_that_the_guide_names():
    rows = dict(re.findall(r"^\| `(reusable|tau|lengths|lexical|content)` \| ([^|]+?) \|", GUIDE, flags=re.MULTILINE))
    gate = WarmStartGate()
    assert rows.pop("lengths") == f"{gate.lengths[0]} to {gate.lengths[1]}"
    assert rows == {name: str(getattr(gate, name)) for name in ("reusable", "tau", "lexical", "content")}


def test_the_library_has_the_defaults_that_the_guide_names():
    defaults = {name: p.default for name, p in inspect.signature(WarmStartLibrary).parameters.items()}
    rows = re.findall(r"^\| `(slots|encoder|full|quantization|location|max_bytes)` \| `?\"?([^|`\"]+?)\"?`? \|", GUIDE, flags=re.MULTILINE)
    assert {name: value for name, value in rows if name != "encoder"} == {
        name: str(defaults[name]) for name in ("slots", "full", "quantization", "location", "max_bytes")
    }
    assert dict(rows)["encoder"] == "model"
