"""How a model is parallelized: moved, compiled, sharded, and in which number format it computes."""
