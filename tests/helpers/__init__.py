"""What tests of several folders share: caches, padded prompts, stores. Tiny models are in `tests.tiny`."""
