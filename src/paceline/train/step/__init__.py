"""One update: losses of lanes, buffers, weights; eager, as a CUDA graph, or with local SGD."""
