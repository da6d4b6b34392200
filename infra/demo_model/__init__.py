"""Makes the bundled demo model: its synthetic data, tokenizer, training, export. Run by hand; nothing imports it."""
