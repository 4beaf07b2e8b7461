"""SubspaceCache: attention on a few coefficients per key and value."""
