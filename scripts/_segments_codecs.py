"""Requests of agents through stores of the codes of a `KVCodec`, at several shares of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _segments_quality import CALIBRATION_SEED, Bench, Side, Workload
from _segments_verdicts import KL, RECALL, SAVED, summary
from shared import TESTBED
from shared.bars import bar
from shared.results import Row, show
from shared.texts import codec_texts, encode
from tqdm import tqdm

from hf_kvcaches import KVCodec, SegmentPolicy
from hf_kvcaches.segments.tiers import Mode

# What the codecs are calibrated on: tokens of the prose, and of each document.
TOKENS, LENGTH = 16384, 800
MODES: tuple[tuple[str, Mode], ...] = (("prefix caching", "exact"), ("auto", "auto"), ("approximate", "approximate"))
POLICY_COLUMNS = ("check_layer", "probe", "similarity", "repair", "repair_by")


def codecs_of(model: Any, tokenizer: Any, shares: Sequence[float], documents: int) -> list[KVCodec]:
    """Codecs with these shares of the bytes, calibrated once, on prose and so many generated documents."""
    prose = encode(tokenizer, (TESTBED / "prose.txt").read_text(encoding="utf-8"))[:TOKENS]
    texts = codec_texts(tokenizer, prose, documents, LENGTH, CALIBRATION_SEED)
    codec = KVCodec.calibrate(model, None, texts, batch_size=4)
    return [codec.at(share) for share in shares]


def store_rows(
    model: Any, tokenizer: Any, workload: Workload, codecs: Sequence[KVCodec], policy_for: Callable[[KVCodec], SegmentPolicy]
) -> Iterator[Row]:
    """A row for each codec and mode, with the codec's own policy."""
    for codec in codecs:
        policy = policy_for(codec)
        bench = Bench(model, tokenizer, policy)
        for label, mode in MODES:
            side = Side(label, mode, codec)
            answers = list(tqdm(bench.run(workload, side), desc=str(side), total=len(workload), unit=" requests"))
            kls = [kl for answer in answers for kl in answer.kls]
            counts = {"asked": sum(answer.asked for answer in answers), "predictions": len(kls), "kl_over_1": sum(kl > 1 for kl in kls)}
            settings = {name: getattr(policy, name) for name in POLICY_COLUMNS}
            yield summary(workload.name, side, answers) | counts | settings


def report(rows: Sequence[Row]) -> str:
    """A table of all codecs and modes, and the bars."""
    percents = {"FLOPs saved": "saved", "prefix": "share_exact", "repaired": "share_repaired", "probed": "share_probed", "recall": "recall"}
    columns = {"store": "{quantization}", **{name: f"{{{column}:.1%}}" for name, column in percents.items()}}
    columns |= {"KL mean": "{kl_mean:.2g}", "max": "{kl_max:.2g}", "above 1": "{kl_over_1}", "MiB": "{mib:.1f}"}
    columns |= {name.replace("_", " "): f"{{{name}}}" for name in POLICY_COLUMNS}
    return "\n".join([show(rows, {"mode": "{side}", **columns}), "", "Bars", *bars(rows)])


def bars(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each thing that a store of codes is asked to reach."""
    for row in rows:
        if row["side"] != "auto":
            continue
        name, lost = row["quantization"], row["recall_alone"] - row["recall"]
        yield bar(f"{name}: saves {SAVED:.0%} of the prefill's operations", row["saved"] >= SAVED, f"{row['saved']:.1%}")
        yield bar(f"{name}: recall within {100 * RECALL:.0f} points of no reuse", lost <= RECALL, f"{-100 * lost:+.2f}")
        yield bar(f"{name}: mean KL of at most {KL}", row["kl_mean"] <= KL, f"{row['kl_mean']:.2g}")
