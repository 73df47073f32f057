"""Can this machine, can these nodes, train? Each family of checks gathers facts, and judges them in a pure function."""
