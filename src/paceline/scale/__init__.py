"""How batches, lanes and learning rates follow from the world size. Pure arithmetic."""
