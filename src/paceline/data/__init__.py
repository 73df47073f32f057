"""What a rank reads next."""
