"""``penstock chat`` and ``penstock run``: talk to a model in the terminal."""
