"""A model directory without its weights: what its files say, and the texts, tokens and limits that follow."""
