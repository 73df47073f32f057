"""Which samples a rank reads next, and how they become batches."""
