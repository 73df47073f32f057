"""Triton kernels for parts of a transformer's step, each the same bits in every run; torch's operators elsewhere."""
