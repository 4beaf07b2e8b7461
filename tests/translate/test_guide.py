"""docs/translation.md has every option, with its default."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from hf_kvcaches import CacheTranslator, TranslatorConfig

GUIDE = (Path(__file__).parents[2] / "docs" / "translation.md").read_text(encoding="utf-8")


def test_the_guide_has_every_option_with_its_default():
    of_fit = inspect.signature(CacheTranslator.fit).parameters
    assert len(of_fit) == 10
    for parameters in (of_fit, inspect.signature(TranslatorConfig).parameters):
        for name in list(parameters)[4 if parameters is of_fit else 0 :]:
            if name != "config":
                assert re.search(rf"^\|.*`{name}`", GUIDE, flags=re.MULTILINE), name
    assert f"| `payload` | {of_fit['payload'].default} |" in GUIDE
    assert f"| `layers_per_code` | {TranslatorConfig().layers_per_code} |" in GUIDE
    assert f"`config.prefill_share` ({TranslatorConfig().prefill_share})" in GUIDE
