"""The shard format, and the stores that shards come from."""
