"""What survives a run."""
