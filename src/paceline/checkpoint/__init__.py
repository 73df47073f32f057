"""Checkpoints: saving, verifying, finding, restoring and exporting them."""
