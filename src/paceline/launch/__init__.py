"""How N processes start, and how they end."""
