"""What the numbers of `eval_subspace.py` say: the paper's four falsifiers, and what the caches are asked to reach."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from _subspace_variants import ENDS, FULL, MODES, NONE, Window
from shared.bars import bar, not_measured
from shared.results import Row, rows_where

Rows = Sequence[Row]

# A subspace is called small if the cache takes at most this share of the bytes.
SMALL = 0.375
# What an error may grow by from the first spans to the last one, and what is too little to speak of, in percent.
GROWTH, NEGLIGIBLE = 2.0, 0.3
# Rank correlation from which a bound is said to predict.
PREDICTS = 0.5
# Adaptive bases are judged behind their warm-up, which is exact.
WARM_UP = 256
# How far apart the bytes of two caches may be that are said to have the same.
SAME_BYTES = 0.02
NOT_MEASURED = "not measured: "


def verdicts(found: dict[str, Rows], tokens: int) -> list[str]:
    """One line for each falsifier and each bar."""
    texts = [row for row in found.get("perplexity", ()) if row["mode"] != "full"]
    whole = [row for row in texts if (row["from"], row["to"]) == (2, tokens)]
    lines = ["The paper's falsifiers (held: the paper's claim stands)"]
    late = [row for row in texts if row["from"] > WARM_UP]
    lines += [_small_rank(whole), _adaptive(late), _growth(texts, tokens), _prediction(found.get("bounds", ()))]
    lines.append("Bars")
    lines += [
        _cost("static aware, no window", whole, NONE, 0.375, 1.0, coefficients=""),
        _cost("static aware, 4 + 64 exact", whole, ENDS, 0.375, 0.3, coefficients=""),
        _cost("static aware int8, 4 + 64 exact", whole, ENDS, 0.20, 0.5, coefficients="int8"),
        _cost("static aware int8, no window", whole, NONE, 0.375, 1.0, coefficients="int8"),
        _recall(found.get("recall", ()), ENDS, 0.375, 2.0),
        *(_adaptive_bar(late, window) for window in (NONE, ENDS)),
    ]
    return lines


def _line(number: int, claim: str, verdict: str, numbers: str) -> str:
    return f"  {number}. {claim}: {verdict}{f' ({numbers})' if numbers else ''}"


def _small_rank(whole: Rows) -> str:
    claim = f"some rank far below the head size costs at most 1% perplexity (at most {SMALL} of the bytes, no window)"
    # A warm-up is exact, so that means over whole rows say little of adaptive bases.
    small = [
        row for row in whole if row["mode"] == "static" and _window(row) == NONE and row["bytes_ratio"] <= SMALL and not row["coefficients"]
    ]
    if not small:
        return _line(1, claim, NOT_MEASURED + "perplexity of a small cache", "")
    best = min(small, key=lambda row: row["change_percent"])
    held = best["change_percent"] <= 1
    return _line(1, claim, _held(held), f"best {best['change_percent']:+.2f}% at {best['bytes_ratio']:.3f}: {best['variant']}")


def _adaptive(late: Rows) -> str:
    claim = f"adaptive bases are no worse than static ones at the same rank (behind {WARM_UP} tokens)"
    pairs = _pairs(late)
    if not pairs:
        return _line(2, claim, NOT_MEASURED + "adaptive mode", "")
    worse = [f"{rule}: {other:+.2f}% against {static:+.2f}%" for rule, static, other in pairs if other > static]
    return _line(2, claim, _held(not worse), "; ".join(worse) or f"{len(pairs)} pairs")


def _pairs(late: Rows) -> list[tuple[str, float, float]]:
    """(rule, loss of static, loss of adaptive) where both have the same ranks, rotation, coefficients and window."""
    key = lambda row: tuple(row[name] for name in ("rule", "rotation", "coefficients", "sinks", "recent", "from"))  # noqa: E731
    by_mode: dict[str, dict[Any, float]] = {mode: {} for mode in MODES}
    for row in late:
        best = by_mode[row["mode"]]
        best[key(row)] = min(best.get(key(row), float("inf")), row["change_percent"])
    static, adaptive = (by_mode[mode] for mode in MODES)
    return [(f"{each[0]} [{each[3]}+{each[4]}]", static[each], adaptive[each]) for each in static if each in adaptive]


def _growth(texts: Rows, tokens: int) -> str:
    claim = f"the loss does not grow sharply with the context (last span at most {GROWTH}x the mean of the others, or below {NEGLIGIBLE}%)"
    grown: dict[bool, list[str]] = {False: [], True: []}
    calm = []
    static = [row for row in texts if row["mode"] == "static"]
    for name in dict.fromkeys(row["variant"] for row in static if _window(row) == NONE and row["bytes_ratio"] <= SMALL):
        own = [row for row in texts if row["variant"] == name and _window(row) == NONE and (row["from"], row["to"]) != (2, tokens)]
        if len(own) < 2:
            continue
        *earlier, last = (row["change_percent"] for row in sorted(own, key=lambda row: row["from"]))
        before = sum(earlier) / len(earlier)
        sharp = last > max(GROWTH * before, NEGLIGIBLE)
        # A wrong factor on all logits does more harm the more of them there are; that is no matter of positions.
        (grown[own[0]["gamma"] == "paper"] if sharp else calm).append(f"{name}: {before:+.2f}% to {last:+.2f}%")
    if not (calm or any(grown.values())):
        return _line(3, claim, NOT_MEASURED + "spans of a small cache", "")
    apart = f"; with the paper's gamma it does: {'; '.join(grown[True])}" if grown[True] else ""
    return _line(3, claim, _held(not grown[False]), "; ".join(grown[False] or calm) + apart)


def _prediction(bounds: Rows) -> str:
    claim = f"operator-norm residuals predict errors (median rank correlation of at least {PREDICTS} over heads and ranks)"
    if not bounds:
        return _line(4, claim, NOT_MEASURED + "bounds", "")
    parts, held = [], True
    for what in ("logits", "output"):
        numbers = [row["spearman"] for row in bounds if row["what"] == what]
        held &= median(numbers) >= PREDICTS
        parts.append(f"{what} {median(numbers):.2f}, by layer {min(numbers):.2f} to {max(numbers):.2f}")
    above = sum(row["above_bound"] for row in bounds)
    return _line(4, claim, _held(held), f"{'; '.join(parts)}; {above} errors above their bound")


def _cost(name: str, whole: Rows, window: Window, ratio: float, most: float, coefficients: str) -> str:
    claim = f"{name}: at most {most:g}% perplexity at {ratio:g} of the bytes"
    rows = [row for row in whole if _kind(row) == ("static", "aware", coefficients, window) and row["bytes_ratio"] <= ratio]
    if not rows:
        return not_measured(claim)
    best = min(rows, key=lambda row: row["change_percent"])
    numbers = f"{best['change_percent']:+.3f}% at {best['bytes_ratio']:.3f}, {best['variant']}"
    return bar(claim, best["change_percent"] <= most, numbers)


def _recall(rows: Rows, window: Window, ratio: float, most: float) -> str:
    claim = f"static aware, {window[0]} + {window[1]} exact: at most {most:g} points of recall at {ratio:g} of the bytes"
    full = next((row for row in rows if row["variant"] == FULL), None)
    small = [row for row in rows if _kind(row) == ("static", "aware", "", window) and row["bytes_ratio"] <= ratio]
    if full is None or not small:
        return not_measured(claim)
    best = max(small, key=lambda row: row["share"])
    numbers = f"{100 * best['share']:.1f}% of {best['questions']}, full cache {100 * full['share']:.1f}%, {best['variant']}"
    return bar(claim, round(100 * (full["share"] - best["share"]), 6) <= most, numbers)


def _adaptive_bar(late: Rows, window: Window) -> str:
    name = "no window" if window == NONE else f"{window[0]} + {window[1]} exact"
    claim = f"adaptive aware, {name}: within 1.5x of static's loss at the same bytes, behind {WARM_UP} tokens"
    rows = [row for row in late if _kind(row)[1:] == ("aware", "", window) and row["bytes_ratio"] <= SMALL]
    static, adaptive = (rows_where(rows, mode=mode) for mode in MODES)
    near = lambda a, b: abs(a["bytes_ratio"] - b["bytes_ratio"]) <= SAME_BYTES  # noqa: E731
    pairs = [(one, other) for one in adaptive for other in static if one["from"] == other["from"] and near(one, other)]
    if not pairs:
        return not_measured(claim)
    one = min((pair[0] for pair in pairs), key=lambda row: row["change_percent"])
    best = min((pair[1] for pair in pairs if pair[0] is one), key=lambda row: row["change_percent"])
    text = "{change_percent:+.3f}% at {bytes_ratio:.3f}, {variant}"
    numbers = f"{text.format(**one)}; static {text.format(**best)}"
    return bar(claim, one["change_percent"] <= 1.5 * best["change_percent"], numbers)


def _kind(row: Row) -> tuple[str, str | None, str | None, Window]:
    return row["mode"], row.get("rotation"), row.get("coefficients"), _window(row)


def _window(row: Row) -> Window:
    return int(row.get("sinks") or 0), int(row.get("recent") or 0)


def _held(is_true: bool) -> str:
    return "held" if is_true else "FAILED"
