"""How samples lie in shards, and where shards come from."""
