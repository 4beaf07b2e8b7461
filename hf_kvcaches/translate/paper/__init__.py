"""Semantic Cache Distillation as the paper has it, in the plainest form: Reuse, Patch, routing, and stability constants."""
