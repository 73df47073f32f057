"""Who this process is among its peers."""
