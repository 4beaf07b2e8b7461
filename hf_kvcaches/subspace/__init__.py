"""SubspaceCache: attention over coefficients in low-dimensional subspaces."""
