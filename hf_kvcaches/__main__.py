"""`python -m hf_kvcaches`: the command `hf-kvcaches`."""

from __future__ import annotations

import sys

from hf_kvcaches.cli import main

if __name__ == "__main__":
    sys.exit(main())
