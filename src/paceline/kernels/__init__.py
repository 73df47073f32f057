"""Parts of a transformer's step by Triton kernels and tuned matrix products, each the same bits in every run; torch's operators elsewhere."""
