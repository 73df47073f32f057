"""Is a rank stuck, where, and who waits for it? Ranks write what they see of themselves; anybody may read it."""
