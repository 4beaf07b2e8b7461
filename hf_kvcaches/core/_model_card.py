"""The README that explains an artifact to whoever finds its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_kvcaches.core.fingerprint import ModelFingerprint

_BEGIN = "<!-- hf_kvcaches: begin of the generated part, which saving replaces -->"
_END = "<!-- hf_kvcaches: end of the generated part -->"


def model_card(
    class_name: str,
    module: str,
    artifact_type: str,
    summary: str,
    fingerprint: ModelFingerprint | None,
    calibration: str,
    load_from: str,
) -> str:
    """The card of an artifact.

    Args:
        load_from: What to pass to `from_pretrained`.
    """
    if fingerprint is None:
        model = "Not bound to one model."
    else:
        facts = "\n".join(f"| {key} | {_cell(value)} |" for key, value in fingerprint.facts.items() if value not in (None, ""))
        model = (
            f"{_cell(fingerprint.describe())}\n\nOther weights, adapters or tokenizers are refused: what is calibrated for one "
            f"model is wrong for another.\n\n| | |\n|---|---|\n| fingerprint | `{fingerprint.digest}` |\n{facts}"
        )
    body = f"""# {artifact_type}

{summary}

## For which model

{model}

## How it was calibrated

{calibration}

## How to load it

```python
from {module} import {class_name}

artifact = {class_name}.from_pretrained({load_from!r}, model=model, tokenizer=tokenizer)
```"""
    return card_of(body, "hf-kvcaches", ["kv-cache", "hf-kvcaches", artifact_type])


def card_of(body: str, library: str, tags: Sequence[str]) -> str:
    """A new card: front matter for the Hub, then the generated part.

    Args:
        body: The generated part.
        library: What loads it.
    """
    listed = "\n".join(f"- {tag}" for tag in tags)
    return f"---\nlibrary_name: {library}\ntags:\n{listed}\n---\n\n{_BEGIN}\n{body.strip()}\n{_END}\n"


def merge_cards(existing: str | None, generated: str) -> str | None:
    """The card to write: a person's text around the generated part stays, and a card without that part is theirs (`None`)."""
    if existing is None:
        return generated
    start, end = existing.find(_BEGIN), existing.find(_END)
    if start < 0 or end < start:
        return None
    return existing[:start] + generated[generated.index(_BEGIN) :].rstrip("\n") + existing[end + len(_END) :]


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same names as a Markdown table; "" for none."""
    if not rows:
        return ""
    cells = [[_cell(row.get(name)) for name in rows[0]] for row in rows]
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}", *(f"| {' | '.join(line)} |" for line in cells)]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
