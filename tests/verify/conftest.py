"""The scripts that verify is tried on are programs, not tests."""

collect_ignore = ["good"]
