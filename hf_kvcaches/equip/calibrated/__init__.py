"""Artifacts that pruning may use: each is measured once for a model."""
