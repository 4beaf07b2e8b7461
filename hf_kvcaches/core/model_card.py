"""The README that explains an artifact to whoever finds its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCardData

from hf_kvcaches.core.fingerprint import ModelFingerprint

CARD_NAME = "README.md"
_BEGIN = "<!-- hf_kvcaches: begin of the generated part, which saving replaces -->"
_END = "<!-- hf_kvcaches: end of the generated part -->"


def model_card(kind: type, artifact_type: str, fingerprint: ModelFingerprint | None, calibration: str, load_from: str) -> str:
    """Return the generated part of the card of an artifact.

    Args:
        kind: The artifact's class.
        calibration: How it was made, as Markdown.
        load_from: The argument of `from_pretrained`.
    """
    summary = (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    code = f"from {kind.__module__} import {kind.__name__}\n\n"
    code += f"artifact = {kind.__name__}.from_pretrained({load_from!r}, model=model, tokenizer=tokenizer)"
    sections = {
        "For which model": "Not bound to one model." if fingerprint is None else _model(fingerprint),
        "How it was calibrated": calibration,
        "How to load it": f"```python\n{code}\n```",
    }
    text = "\n\n".join(f"## {title}\n\n{section}" for title, section in sections.items())
    return f"# {artifact_type}\n\n{summary}\n\n{text}"


def merge_card(existing: str | None, generated: str, tags: Sequence[str]) -> str | None:
    """Return an existing card with a new generated part, a whole new card, or None where a person's card has no generated part."""
    if existing is None:
        data = ModelCardData(library_name="hf-kvcaches", tags=["kv-cache", "hf-kvcaches", *tags])
        existing = f"---\n{data.to_yaml()}\n---\n\n{_BEGIN}{_END}\n"
    before, begin, rest = existing.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    return f"{before}{begin}\n{generated}\n{end}{after}" if begin and end else None


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same names as a Markdown table; "" for none."""
    if not rows:
        return ""
    cells = [[_cell(row.get(name)) for name in rows[0]] for row in rows]
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}", *(f"| {' | '.join(line)} |" for line in cells)]
    return "\n".join(lines)


def _model(fingerprint: ModelFingerprint) -> str:
    facts = {"fingerprint": f"`{fingerprint.digest}`", **fingerprint.facts}
    table = markdown_table([{"Property": name, "Value": value} for name, value in facts.items() if value not in (None, "")])
    return f"{_cell(fingerprint.describe())}\n\nOther weights, adapters or tokenizers are refused.\n\n{table}"


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
