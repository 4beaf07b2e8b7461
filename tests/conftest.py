"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# How many examples a property is tried on, by tier: pytest's --hypothesis-profile names one. Where nobody is there to look at a rare
# example, a run is to say of a change what the run before said. Elsewhere examples are drawn anew.
for name, examples in (("fast", 20), ("full", 200)):
    settings.register_profile(name, max_examples=examples, deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("fast")
