"""Pure functions on tensors, each with a plain PyTorch reference beside it."""
