"""Live measurements of a training run: heartbeats, time per phase, stragglers, signs of progress."""
