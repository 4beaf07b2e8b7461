"""Plug-ins by which other engines keep and send keys and values as a codec's codes: `vllm` and `lmcache`. Each needs its engine."""
