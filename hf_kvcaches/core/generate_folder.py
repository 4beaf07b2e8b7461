"""The folder, or Hub repository, that `generate` loads as `custom_generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import Cache

from hf_kvcaches import __version__
from hf_kvcaches.core._model_card import card_of, markdown_table, merge_cards
from hf_kvcaches.core.artifact import make_folder
from hf_kvcaches.core.files import write_atomically
from hf_kvcaches.core.publishing import CARD_NAME
from hf_kvcaches.errors import ConfigError

_CODE = '''"""Generates with a new {name} of hf-kvcaches for each call."""

from hf_kvcaches import ConfigError, {name}
from hf_kvcaches.compat import GENERATE_CACHE

OPTIONS = {options!r}


def generate(*inputs, model, cache=None, past_key_values=None, **arguments):
    """Calls `model.generate` with the same arguments, among which may be other values of OPTIONS."""
    given = past_key_values if cache is None else cache
    if given is not None:
        got = type(given).__name__
        hint = "Leave it out, or go on with your cache by type(model).generate(model, ...)."
        raise ConfigError.of("past_key_values", "none, because each call gets a new cache here", got, hint)
    arguments[GENERATE_CACHE] = {name}(model, **{{option: arguments.pop(option, value) for option, value in OPTIONS.items()}})
    return type(model).generate(model, *inputs, **arguments)
'''
_CARD = """# {name} as custom_generate

{summary} `generate` makes a new one for each call.

```bash
pip install hf-kvcaches
```

```python
output = model.generate(**inputs, custom_generate={repository!r}, trust_remote_code=True, max_new_tokens=64)
```

{options}All other arguments are those of `generate`: batches, streamers, beams, assistants."""


FILES = ("custom_generate/generate.py", "custom_generate/requirements.txt", CARD_NAME)


def write(folder: Path, cache_class: type[Cache], options: dict[str, Any], repo_id: str | None = None) -> None:
    """Writes `custom_generate/generate.py`, its requirements, and a card.

    Args:
        folder: Made if need be; other files in it stay.
        cache_class: A public class of this package.
        options: What its constructor takes behind the model, by name.
        repo_id: Where the folder will be found; None for a repository of the folder's name.
    """
    name = cache_class.__name__
    if not cache_class.__module__.startswith("hf_kvcaches."):
        hint = "Write custom_generate/generate.py by hand, with the class in it."
        raise ConfigError.of("cache_class", "a cache of hf_kvcaches, which others can import", name, hint)
    for option, value in options.items():
        if not _is_json(value):
            hint = "Write the folder with other options, and make this one in its custom_generate/generate.py."
            raise ConfigError.of(option, "a JSON value, which can be written down", value, hint)
    make_folder(folder / "custom_generate")
    write_atomically(folder / "custom_generate" / "generate.py", _CODE.format(name=name, options=options).encode())
    write_atomically(folder / "custom_generate" / "requirements.txt", f"hf-kvcaches>={__version__}\n".encode())
    path = folder / CARD_NAME
    fresh = _card(repo_id or f"OWNER/{folder.resolve().name}", cache_class, options)
    card = merge_cards(path.read_text("utf-8") if path.exists() else None, fresh)
    if card is not None:
        write_atomically(path, card.encode())


def _card(repo_id: str, cache_class: type[Cache], options: dict[str, Any]) -> str:
    summary = (cache_class.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    table = markdown_table([{"Option": f"`{option}`", "Here": f"`{value!r}`"} for option, value in options.items()])
    listed = f"Options, each of which is an argument of that call, too:\n\n{table}\n\n" if options else ""
    body = _CARD.format(name=cache_class.__name__, summary=summary, repository=repo_id, options=listed)
    return card_of(body, "transformers", ["custom_generate", "kv-cache", "hf-kvcaches"])


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
