"""What a model directory holds besides weights: tokenizer, chat template, limits, and the parsers of its answers."""
