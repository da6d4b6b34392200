"""Models without their weights: directory, tokenizer, chat template, detokenizer, and which parsers they need."""
