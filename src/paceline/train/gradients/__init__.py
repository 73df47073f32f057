"""How the gradients of lanes are added, on this rank and over all ranks."""
