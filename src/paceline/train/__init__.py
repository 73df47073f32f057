"""How one step happens, and then the next."""
