"""Between text and tokens: chat templates, tokenisation, detokenisation."""
