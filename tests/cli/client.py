"""What a user's code looks like to a type checker; `make wheel-check` runs mypy --strict on it, against the installed wheel."""

from typing import Any

from hf_kvcaches import AdaptiveSubspace, ConfigError, EquipCache, GrowingCache, KVCodec, SubspaceCache, VerifyReport, per_call, verify
from hf_kvcaches.cli import main


def caches(model: Any, tokenizer: Any) -> list[GrowingCache | EquipCache | SubspaceCache]:
    codec: KVCodec = KVCodec.calibrate(model, tokenizer, ["a text"], bytes_ratio=0.25)
    pruned = EquipCache(model, "streaming", budget=512, storage="int8")
    positions = pruned.kept_positions(0)
    assert positions is not None
    return [GrowingCache(model), pruned, SubspaceCache(model, codec), SubspaceCache(model, adaptive=AdaptiveSubspace(rank=4))]


def check(model: Any, inputs: Any) -> float:
    report: VerifyReport = verify(model, lambda: GrowingCache(model), inputs, max_new_tokens=4)
    return report.mean_kl


def generated(model: Any, inputs: Any) -> Any:
    try:
        return model.generate(**inputs, custom_generate=per_call(EquipCache, policy="streaming", budget=512))
    except ConfigError as error:
        return str(error)


def wrong(model: Any) -> GrowingCache:
    # Types of the package are read: an argument that is not there is an error, which is expected here.
    return GrowingCache(model, bugdet=3)  # type: ignore[call-arg]


code: int = main(["--version"]) if __name__ == "__main__" else 0
