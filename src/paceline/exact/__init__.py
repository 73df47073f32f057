"""The promise: lanes, one tree, counted order and seeds. One optimizer step, read from `step.py` on."""
