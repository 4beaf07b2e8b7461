"""The version of the package, and the versions of transformers that it was tested with."""

import warnings
from functools import cache

__version__ = "0.3.0"
OLDEST_TESTED, NEWEST_TESTED = "5.17.0", "5.24.0"


@cache
def warn_of_untested_version() -> None:
    """Warn, once a process, where transformers is newer than any version that was tested."""
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) > Version(NEWEST_TESTED):
        warnings.warn(
            f"hf_kvcaches was tested with transformers {OLDEST_TESTED} to {NEWEST_TESTED}, and {transformers.__version__} is newer. Check "
            f"your caches with hf_kvcaches.verify, upgrade hf-kvcaches, or pip install 'transformers<={NEWEST_TESTED}'.",
            stacklevel=3,
        )
