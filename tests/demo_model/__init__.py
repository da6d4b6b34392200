"""Tools that make the bundled demo models: synthetic data, tokenizer, training, export. Not part of the wheel."""
