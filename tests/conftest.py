"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# Where nobody is there to look at a rare example, a run is to say of a change what the run before said. Elsewhere examples are drawn anew.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
