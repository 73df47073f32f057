"""How checkpoints of other programs become a checkpoint of a run."""
