"""Whether a run is right."""
