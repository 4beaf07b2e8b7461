"""Pure functions on tensors, in PyTorch and as Triton kernels."""
