"""Start of N processes, supervision, and their end."""
