"""How curves and scales are drawn: in a file of their own, or as part of a page."""
