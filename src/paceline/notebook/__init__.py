"""How does a cell of a notebook run on several ranks? `%load_ext paceline`, then `%%paceline -n 2`."""
