"""Evaluation and prediction: every sample once, the same result on any number of ranks."""
