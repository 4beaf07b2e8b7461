"""SubspaceCache: attention over coefficients in low-dimensional subspaces."""

from hf_kvcaches.subspace.rooflines import roofline

__all__ = ["roofline"]
